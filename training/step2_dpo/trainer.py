"""The loop of direct preference optimisation: batches of ranked responses, what policy and reference say of them, the
preference loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.

B sequences (a prompt with one response each), Q pairs of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch

from training.step2_dpo.batches import PairBatch, all_pair_batches, pair_batches, response_tokens
from training.step2_dpo.loss import Objective, best_response_loss, log_ratios, preference_loss, sequence_sums
from training.step2_dpo.reference import References
from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.checkpoints import Checkpoints
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.documents import unshared
from training.utils.layout.order import ShuffledStream
from training.utils.layout.ranked import real_tokens
from training.utils.run.metrics import MetricsWriter, progress_bar, show
from training.utils.run.traces import traced

_SUMS = ("loss", "pairs", "right", "chosen_reward", "rejected_reward")


@dataclass(frozen=True)
class Evaluation:
    """loss: a prompt's. Over the pairs, with a response's implicit reward beta x log(policy / reference): accuracy, the
    share whose better response has the strictly higher one; chosen_reward and rejected_reward, the means of the better
    and the worse; reward_margin, their difference. A policy that is its reference has 0 in all of them."""

    loss: float
    accuracy: float
    reward_margin: float
    chosen_reward: float
    rejected_reward: float


@dataclass(frozen=True)
class DpoResult:
    """The evaluations before and after training; None where there are no evaluation rows."""

    before: Evaluation | None
    after: Evaluation | None
    seconds: float

    def summary(self) -> dict[str, float | None]:
        """The run's closing figures."""
        after = {} if self.after is None else vars(self.after)
        return {
            "eval_loss_before": None if self.before is None else self.before.loss,
            **{f"eval_{field.name}": after.get(field.name) for field in fields(Evaluation)},
            "seconds": self.seconds,
        }

    def sentence(self) -> str:
        """The same in words."""
        before, after = self.before, self.after
        if before is None or after is None:
            return "trained, without evaluation rows,"
        return (
            f"evaluation loss {before.loss:.3f} -> {after.loss:.3f}, pair accuracy {after.accuracy:.3f}, reward margin "
            f"{after.reward_margin:.2f},"
        )


class DpoTrainer:
    """Trains `engine`, a PolicyModel under DeepSpeed, on ranked responses."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[ResponsesRow],
        eval_rows: Sequence[ResponsesRow],
        references: References,
        objective: Objective,
        settings: LoopSettings,
        metrics: MetricsWriter,
        checkpoints: Checkpoints | None = None,
        bad_steps: BadSteps | None = None,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.references = references
        self.objective = objective
        self.settings = settings
        self.metrics = metrics
        self.checkpoints = checkpoints or Checkpoints()
        self.bad_steps = bad_steps or BadSteps()
        self.ranks = engine.ranks

    def train(self) -> DpoResult:
        """Take every optimizer step; return the evaluations before and after."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        done, saved = self.checkpoints.restore()
        if saved:
            before, after = (saved[name] and Evaluation(**saved[name]) for name in ("before", "after"))
        else:
            before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 2, DPO", self.ranks.is_main, done=done) as bar:
            for step in traced(range(done + 1, settings.total_steps + 1), settings.traces, self.ranks.rank):
                taken = stream.take((step - 1) * settings.items_per_step, settings.items_per_step)
                figures = self._optimizer_step(taken)
                self.metrics.write(step, figures)
                self.bad_steps.check(step, figures, [self.train_rows[row].row_id for row in taken])
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
                if self.checkpoints.due(step, settings.total_steps):
                    self.checkpoints.save(step, {"before": before and asdict(before), "after": after and asdict(after)})
        return DpoResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> Evaluation | None:
        """Return (and record) what the policy makes of the evaluation rows; None where there are none."""
        settings, rows = self.settings, self.eval_rows
        if not len(rows):
            return None
        self.engine.eval()
        sums = dict.fromkeys(_SUMS, 0.0)
        with torch.no_grad():
            for batch in all_pair_batches(
                rows, range(len(rows)), settings.eval_plan, self.ranks, settings.pad_token_id
            ):
                _, figures = self._loss(batch, self.references.eval(batch), float(len(rows)))
                sums = {name: sums[name] + figures[name] for name in _SUMS}
        result = Evaluation(**_means(summed_numbers(sums, self.ranks.device)))
        self.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        return result

    def _optimizer_step(self, taken: Sequence[int]) -> dict[str, float]:
        started = time.monotonic()
        plan = self.settings.train_plan
        batches = pair_batches(self.train_rows, taken, plan, self.ranks, self.settings.pad_token_id)
        self.engine.eval()
        with torch.no_grad():
            references = [self.references.train(batch) for batch in batches]
        sums = dict.fromkeys(_SUMS, 0.0)
        self.engine.train()
        for batch, reference_B in zip(batches, references, strict=True):
            loss, figures = self._loss(batch, reference_B, float(len(taken)))
            self.engine.backward(loss)
            sums = {name: sums[name] + figures[name] for name in _SUMS}
        report = self.engine.step()
        totals = summed_numbers(sums, self.ranks.device)
        seconds = time.monotonic() - started
        rows = [self.train_rows[index] for index in taken]
        tokens = sum(real_tokens(len(row.prompt_ids), response_tokens(row), plan.packed) for row in rows)
        return {
            **{f"train/{name}": value for name, value in _means(totals).items()},
            "train/pairs_per_second": totals["pairs"] / seconds,
            "train/tokens_per_second": tokens / seconds,
            **self._mfu(rows, seconds),
            **report.figures("train"),
        }

    def _mfu(self, rows: Sequence[ResponsesRow], seconds: float) -> dict[str, float]:
        """The policy's forward and backward alone count, not what reads the reference."""
        meter = self.settings.meter
        if meter is None:
            return {}
        documents = [responses_document(row, are_targets=True) for row in rows]
        if not self.settings.train_plan.packed:
            documents = [alone for document in documents for alone in unshared(document)]
        return {"train/mfu": meter.mfu(documents, sum(sum(response_tokens(row)) for row in rows), seconds)}

    def _loss(
        self, batch: PairBatch, reference_B: torch.Tensor, prompts: float
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """This micro-batch's part of the loss, a scalar, and of the sums named in _SUMS."""
        ranked, objective = batch.ranked, self.objective
        rows = ranked.rows
        logprobs_M = self.engine(rows).logprobs_M
        logprobs_B, tokens_B = (
            sequence_sums(values_M, rows.sequence_M, rows.end_B.numel())
            for values_M in (logprobs_M, torch.ones_like(logprobs_M))
        )
        ratios_B = log_ratios(logprobs_B, reference_B, tokens_B, objective.loss_type)
        loss = preference_loss(ratios_B, ranked.better_Q, ranked.worse_Q, ranked.weight_Q, prompts, objective)
        if objective.sft_coef > 0:
            is_best_B = torch.tensor(batch.place_B == 0, device=ratios_B.device)
            loss = loss + objective.sft_coef * best_response_loss(logprobs_B, tokens_B, is_best_B, prompts)
        rewards_B = objective.beta * ratios_B.detach()
        better_Q, worse_Q = rewards_B.index_select(0, ranked.better_Q), rewards_B.index_select(0, ranked.worse_Q)
        right = (better_Q > worse_Q).sum()
        sums = torch.stack([loss.detach(), right, better_Q.sum(), worse_Q.sum()]).tolist()  # one wait for the device
        loss_sum, right_sum, chosen, rejected = sums
        return loss, dict(zip(_SUMS, (loss_sum, float(better_Q.numel()), right_sum, chosen, rejected), strict=True))


def _means(totals: dict[str, float]) -> dict[str, float]:
    """What an Evaluation holds, out of the sums over all ranks."""
    chosen, rejected = (totals[f"{kind}_reward"] / totals["pairs"] for kind in ("chosen", "rejected"))
    return {
        "loss": totals["loss"],
        "accuracy": totals["right"] / totals["pairs"],
        "reward_margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
