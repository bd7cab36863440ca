"""The loop of direct preference optimisation: batches of ranked responses, their log-probabilities under policy and
reference, the preference loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.

B sequences (a prompt with one response each), Q pairs of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.step2_dpo.losses.pairs import Objective, Responses, best_response_loss, log_ratios, preference_loss
from training.step2_dpo.record import dpo_record
from training.utils.divergence.signs import EQUAL_PAIRS, Uniform
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, accumulate, on_device
from training.utils.engine.ranks.collectives import DeviceSums
from training.utils.layout.ranked import sequence_sums
from training.utils.preference.batches import PreferenceBatch, PreferenceStep, eval_batches, train_batches
from training.utils.preference.reference import References, read_reference
from training.utils.preference.samples import write_ranked_samples
from training.utils.preference.scoring import gathered_scores
from training.utils.setup.training_run import NextStep, TrainingLoop, TrainingRun

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.preference.evaluation import ScoredResponses
    from training.utils.setup.result import TrainingResult


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
    """The same in words."""
    return (
        f"evaluation loss {before.loss:.3f} -> {after.loss:.3f}, pair accuracy {after.accuracy:.3f}, reward margin "
        f"{after.reward_margin:.2f}"
    )


class DpoTrainer:
    """Trains `run.engine`, a PolicyModel under DeepSpeed, on ranked responses."""

    def __init__(self, run: TrainingRun[ResponsesRow], references: References, objective: Objective) -> None:
        self.run = run
        self.references = references
        self.objective = objective

    def train(self) -> TrainingResult:
        """Take every optimizer step."""
        loop = TrainingLoop(self.run, self.evaluate, lambda saved: DpoEvaluation(**saved), _uniform(self.objective))
        for step in loop.steps(lambda taken: train_batches(self.run, taken, are_targets=True)):
            loop.record(step.number, self._optimizer_step(step), step.taken)
        return loop.result(closing_figures, closing_sentence)

    def evaluate(self, step: int) -> DpoEvaluation | None:
        """Return (and record) the policy's implicit rewards of the evaluation rows; None without such rows."""
        run = self.run
        if not len(run.eval_rows):
            return None
        run.engine.eval()
        sums = DeviceSums()
        read: list[tuple[np.ndarray, torch.Tensor]] = []
        with torch.no_grad():
            for laid_out in eval_batches(run, are_targets=True):
                [batch] = on_device([laid_out], run.ranks.device)
                found = self._loss(batch, self.references.eval(batch), float(len(run.eval_rows)))
                sums.add(found.figures)
                read.append((np.column_stack([batch.row_B, batch.place_B, batch.tokens_B]), found.read))
        result = DpoEvaluation(**_means(sums.totals(run.ranks.device)))
        run.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        if run.samples.count:
            write_ranked_samples(run, step, _gathered_rewards(read))
        return result

    def _optimizer_step(self, step: NextStep[PreferenceStep]) -> dict[str, float]:
        run = self.run
        started = time.monotonic()
        prepared = step.ready()
        batches = on_device(prepared.batches, run.ranks.device)
        references = read_reference(self.references.train, run.engine, batches)
        micro_batches = [
            MicroBatch(batch.ranked.rows, partial(self._loss, batch, reference_B, float(len(step.taken))))
            for batch, reference_B in zip(batches, references, strict=True)
        ]
        recording = run.settings.records.of_step(step.number, run.ranks)
        watched = recording.watched("train", run.engine, micro_batches)
        totals, figures = accumulate([Trainee("train", run.engine, watched, run.guests)], prepared.work)
        recording.write(
            lambda seen: dpo_record(
                step, seen["train"], batches, references, objective=self.objective, figures={**totals, **figures}
            )
        )
        seconds = time.monotonic() - started
        return {
            **{f"train/{name}": value for name, value in _means(totals).items()},
            "train/pairs_per_second": totals["pairs"] / seconds,
            **run.speed_figures(totals, seconds),
            **figures,
        }

    def _loss(self, batch: PreferenceBatch, reference_B: torch.Tensor, prompts: float) -> MicroLoss:
        """This micro-batch's part of the loss; `read` are the implicit rewards [B]."""
        ranked, objective = batch.ranked, self.objective
        rows = ranked.rows
        logprobs_M = self.run.engine(rows).logprobs_M
        logprobs_B, tokens_B = (
            sequence_sums(values_M, rows.sequence_M, rows.end_B.numel())
            for values_M in (logprobs_M, torch.ones_like(logprobs_M))
        )
        ratios_B = log_ratios(logprobs_B, reference_B, tokens_B, objective.loss)
        pairs = (ranked.better_Q, ranked.worse_Q, ranked.weight_Q)
        responses = Responses(ratios_B, logprobs_B, tokens_B, *pairs, batch.columns)
        loss = preference_loss(responses, prompts, objective)
        if objective.sft_coef > 0:
            loss = loss + objective.sft_coef * best_response_loss(logprobs_B, tokens_B, batch.is_best_B, prompts)
        rewards_B = objective.beta * ratios_B.detach()
        return MicroLoss(loss, {"loss": loss, **objective.loss.figures(rewards_B, responses)}, rewards_B)


def _uniform(objective: Objective) -> Uniform | None:
    """The loss of a model to which both responses are alike; None for an objective of which that says nothing."""
    nats = objective.loss.loss_of_equal_pairs
    if nats is None or objective.sft_coef:
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
    chosen, rejected = (totals[f"{side}_reward"] / totals.get(side, pairs) for side in ("chosen", "rejected"))
    return {
        "loss": totals["loss"],
        "accuracy": totals["right"] / pairs,
        "reward_margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
