"""The loop of direct preference optimization: batches of ranked responses, their log-probabilities under policy and
reference, the preference loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.

B sequences (a prompt with one response each), Q pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from training.step2_dpo.loss import (
    FIGURES,
    BetaSchedule,
    Objective,
    Responses,
    at_beta,
    log_ratios,
    preference_loss,
    reads_mismatched,
    weighted_sum,
)
from training.utils.contracts.run import StepTaken
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, on_device
from training.utils.engine.ranks.collectives import DeviceSums
from training.utils.layout.rows import sequence_sums
from training.utils.preference.batches import (
    PreferenceBatch,
    PreferenceStep,
    eval_batches,
    gathered_scores,
    train_batches,
)
from training.utils.preference.reference import Reference, References, response_sums
from training.utils.run.divergence import EQUAL_PAIRS, Uniform
from training.utils.setup.training_run import NextStep, TrainingLoop, TrainingRun

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.preference.evaluation import ScoredResponses
    from training.utils.setup.training_run import TrainingResult


@dataclass(frozen=True)
class DpoEvaluation:
    """Over all pairs but for the loss; all 0 for a policy that is its reference.

    loss: per prompt
    accuracy: share whose better response has the strictly higher implicit reward, beta x log(policy / reference)
    reward_margin: chosen_reward - rejected_reward
    chosen_reward, rejected_reward: mean implicit reward of the better and of the worse response
    """

    loss: float
    accuracy: float
    reward_margin: float
    chosen_reward: float
    rejected_reward: float

    @property
    def in_words(self) -> str:
        return f"loss {self.loss:.3f}, pair accuracy {self.accuracy:.3f}, reward margin {self.reward_margin:.2f}"


def closing_figures(before: DpoEvaluation | None, after: DpoEvaluation | None) -> dict[str, float | None]:
    """Figures of the evaluations before and after training; None without evaluation rows."""
    own = {f"eval_{field.name}": getattr(after, field.name, None) for field in fields(DpoEvaluation)}
    return {"eval_loss_before": getattr(before, "loss", None), **own}


def closing_sentence(before: DpoEvaluation, after: DpoEvaluation) -> str:
    """Return the closing figures as one sentence."""
    return (
        f"evaluation loss {before.loss:.3f} -> {after.loss:.3f}, pair accuracy {after.accuracy:.3f}, reward margin "
        f"{after.reward_margin:.2f}"
    )


class Mismatch(NamedTuple):
    """The run on `mismatched` rows, and their references."""

    run: TrainingRun[ResponsesRow]
    references: References


class Prepared(NamedTuple):
    """An optimizer step on its rows, and on these with the responses of others; None where no loss reads those."""

    own: PreferenceStep
    others: PreferenceStep | None


Referenced = tuple[PreferenceBatch, torch.Tensor]  # a batch with the reference's log-probabilities [B]


class ReferencePoints(NamedTuple):
    """found: each objective's `Responses.reference_point`, 0 for one that has none. mismatched: the log-ratios [B] of
    this rank's prompts with responses of other rows, if one is read from these."""

    found: Sequence[float]
    mismatched: Sequence[torch.Tensor]


@dataclass(frozen=True)
class DpoStep(StepTaken):
    """batches: this rank's; references: [B] of each. objectives: with this step's beta, which follows the schedule."""

    kind: ClassVar[str] = "dpo"

    batches: Sequence[PreferenceBatch]
    references: Sequence[torch.Tensor]
    objectives: Sequence[Objective]
    schedule: BetaSchedule
    points: ReferencePoints


class DpoTrainer:
    """Train `run.engine`, a PolicyModel under DeepSpeed, on ranked or marked responses."""

    def __init__(
        self,
        run: TrainingRun[ResponsesRow],
        references: References,
        objectives: Sequence[Objective],
        *,
        schedule: BetaSchedule | None = None,
        others: Mismatch | None = None,
    ) -> None:
        """objectives: the terms of the sum that is minimised. schedule: of beta; None: that of the objectives.
        others: for losses that read responses of other rows."""
        assert others is not None or not reads_mismatched(objectives)
        self.run = run
        self.references = references
        self.objectives = tuple(objectives)
        self.others = others
        self.schedule = schedule or BetaSchedule(objectives[0].beta, objectives[0].beta)

    def train(self) -> TrainingResult:
        """Take every optimizer step."""
        loop = TrainingLoop(self.run, self.evaluate, lambda saved: DpoEvaluation(**saved), _uniform(self.objectives))
        for step in loop.steps(self._prepared):
            loop.record(step.number, self._optimizer_step(step), step.taken)
        return loop.result(closing_figures, closing_sentence)

    def evaluate(self, step: int) -> DpoEvaluation | None:
        """Return (and record) the policy's implicit rewards of the evaluation rows; None without such rows."""
        run = self.run
        if not len(run.eval_rows):
            return None
        run.engine.eval()
        objectives = self._objectives_at(step)
        points = self._eval_points(objectives)
        sums = DeviceSums()
        read: list[tuple[np.ndarray, torch.Tensor]] = []
        with torch.no_grad():
            for batch, reference_B in _referenced_eval(run, self.references.eval):
                found = self._loss(batch, reference_B, float(len(run.eval_rows)), objectives=objectives, points=points)
                sums.add(found.figures)
                read.append((np.column_stack([batch.row_B, batch.place_B, batch.tokens_B]), found.read))
        result = DpoEvaluation(**_means(sums.totals(run.ranks.device, run.ranks.leads)))
        run.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        wanted = run.sampled_rows(step)
        if wanted:
            run.write_samples(step, _gathered_rewards(read if run.ranks.leads else []).of_prompts(wanted))
        return result

    def _prepared(self, taken: Sequence[int]) -> Prepared:
        others = None if self.others is None else train_batches(self.others.run, taken, are_targets=True)
        return Prepared(train_batches(self.run, taken, are_targets=True), others)

    def _optimizer_step(self, step: NextStep[Prepared]) -> dict[str, float]:
        run, prepared = self.run, step.ready()
        others, objectives = self.others, self._objectives_at(step.number)
        own = self._with_reference(self.references.train, prepared.own)
        points = self._points(
            objectives, own, lambda: self._with_reference(others.references.train, prepared.others) if others else ()
        )
        loss = partial(self._loss, objectives=objectives, points=points.found)
        micro_batches = [
            MicroBatch(batch.ranked.rows, partial(loss, batch, reference_B, float(len(step.taken))))
            for batch, reference_B in own
        ]
        seen = partial(
            DpoStep,
            batches=[batch for batch, _ in own],
            references=[reference_B for _, reference_B in own],
            objectives=objectives,
            schedule=self.schedule,
            points=points,
        )
        totals, figures = run.take(
            step, Trainee("train", run.engine, micro_batches, run.guests), prepared.own.work, seen
        )
        return {
            **{f"train/{name}": value for name, value in _means(totals).items()},
            **{f"train/{name}": value for name, value in totals.items() if name.startswith("loss_")},
            **({"train/beta": objectives[0].beta} if self.schedule.first != self.schedule.last else {}),
            **{
                f"train/point_{one.name}": point
                for one, point in zip(objectives, points.found, strict=True)
                if one.loss.first_pass
            },
            **figures,
        }

    def _objectives_at(self, step: int) -> tuple[Objective, ...]:
        """The terms with the beta of an optimizer step."""
        return at_beta(self.objectives, self.schedule.at(step, self.run.settings.total_steps))

    def _with_reference(self, reference: Reference, part: PreferenceStep | None) -> list[Referenced]:
        """This rank's batches of a step on the device, each with the reference's log-probabilities [B]."""
        batches = on_device([] if part is None else part.batches, self.run.ranks.device)
        self.run.engine.eval()
        with torch.no_grad():
            return [(batch, reference(batch)) for batch in batches]

    def _eval_points(self, objectives: Sequence[Objective]) -> Sequence[float]:
        """The reference points over all evaluation rows."""
        own, others = _referenced_eval(self.run, self.references.eval), self.others
        return self._points(
            objectives, own, lambda: _referenced_eval(others.run, others.references.eval) if others else ()
        ).found

    def _points(
        self, objectives: Sequence[Objective], own: Iterable[Referenced], others: Callable[[], Iterable[Referenced]]
    ) -> ReferencePoints:
        """Return the objectives' reference points. A collective, if any has one.

        own, others: all batches of an optimizer step or of an evaluation on this rank, with their references
        """
        points, mismatched = [0.0] * len(objectives), list[torch.Tensor]()
        passes = {place: one.loss.first_pass for place, one in enumerate(objectives) if one.loss.first_pass}
        for are_others in (False, True):
            reading = {place: each for place, each in passes.items() if each.reads_mismatched is are_others}
            if not reading:
                continue
            self.run.engine.eval()
            sums = DeviceSums()
            with torch.no_grad():
                for batch, reference_B in others() if are_others else own:
                    of_terms = self._responses(batch, reference_B, objectives, points)
                    if are_others:
                        mismatched.append(of_terms[min(reading)].ratios_B)
                    for place, each in reading.items():
                        sums.add({f"{place} {name}": value for name, value in each.sums(of_terms[place]).items()})
            totals = sums.totals(self.run.ranks.device, self.run.ranks.leads)
            for place, each in reading.items():
                begin = f"{place} "
                own_totals = {name.removeprefix(begin): v for name, v in totals.items() if name.startswith(begin)}
                points[place] = each.point(own_totals)
        return ReferencePoints(points, mismatched)

    def _responses(
        self,
        batch: PreferenceBatch,
        reference_B: torch.Tensor,
        objectives: Sequence[Objective],
        points: Sequence[float],
    ) -> list[Responses]:
        """The responses as each objective reads them."""
        ranked, first = batch.ranked, objectives[0]
        rows = ranked.rows
        logprobs_M = self.run.engine(rows).logprobs_M
        logprobs_B, tokens_B = (
            sequence_sums(values_M, rows.sequence_M, rows.end_B.numel())
            for values_M in (logprobs_M, torch.ones_like(logprobs_M))
        )
        weighed_B = logprobs_B if first.ld_alpha == 1.0 else response_sums(logprobs_M, batch, first.ld_alpha)
        pairs = (ranked.better_Q, ranked.worse_Q, ranked.weight_Q, batch.is_best_B, batch.columns)
        return [
            Responses(log_ratios(weighed_B, reference_B, tokens_B, one.loss), logprobs_B, tokens_B, *pairs, point)
            for one, point in zip(objectives, points, strict=True)
        ]

    def _loss(
        self,
        batch: PreferenceBatch,
        reference_B: torch.Tensor,
        prompts: float,
        *,
        objectives: Sequence[Objective],
        points: Sequence[float],
    ) -> MicroLoss:
        """This micro-batch's part of the loss; `read` are the implicit rewards [B] of the first objective."""
        first, of_terms = objectives[0], self._responses(batch, reference_B, objectives, points)
        losses = [preference_loss(read, prompts, one) for read, one in zip(of_terms, objectives, strict=True)]
        loss = weighted_sum(losses, objectives)
        rewards_B = first.beta * of_terms[0].ratios_B.detach()
        parts = {f"loss_{one.name}": part for one, part in zip(objectives, losses, strict=True) if len(losses) > 1}
        return MicroLoss(loss, {"loss": loss, **parts, **FIGURES[first.loss.rows](rewards_B, of_terms[0])}, rewards_B)


def _referenced_eval(run: TrainingRun[ResponsesRow], reference: Reference) -> Iterator[Referenced]:
    """This rank's batches of all evaluation rows on the device, each with the reference's log-probabilities [B]."""
    for laid_out in eval_batches(run):
        [batch] = on_device([laid_out], run.ranks.device)
        yield batch, reference(batch)


def _uniform(objectives: Sequence[Objective]) -> Uniform | None:
    """The loss of a model to which both responses are alike; None for objectives of which that says nothing."""
    objective = objectives[0]
    nats = objective.loss.loss_of_equal_pairs
    if nats is None or len(objectives) > 1 or objective.weight != 1.0:
        return None
    return replace(EQUAL_PAIRS, nats=nats(objective), begins_there=objective.loss.needs_reference)


def _gathered_rewards(read: Sequence[tuple[np.ndarray, torch.Tensor]]) -> ScoredResponses:
    """The implicit rewards of all evaluation rows. A collective. read: of each micro-batch of this rank rows, places,
    tokens, and rewards on its device."""
    return gathered_scores(
        [np.column_stack([places, rewards_B.double().cpu().numpy()[: len(places)]]) for places, rewards_B in read]
    )


def _means(totals: dict[str, float]) -> dict[str, float]:
    """The fields of DpoEvaluation from the sums over all ranks."""
    pairs = totals["pairs"]
    chosen, rejected = (totals[f"{side}_reward"] / max(totals.get(side, pairs), 1.0) for side in ("chosen", "rejected"))
    return {
        "loss": totals["loss"],
        "accuracy": totals["right"] / pairs,
        "reward_margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
