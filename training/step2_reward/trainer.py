"""Step 2's loop: batches of ranked responses, their scores, the ranking loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.step2_reward.loss import ranking_loss
from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.documents import unshared
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.ranked import RankedRows, planned_tokens, ranked_rows, real_tokens
from training.utils.run.metrics import MetricsWriter, progress_bar, show


@dataclass(frozen=True)
class Evaluation:
    """Over the pairs of the evaluation rows: accuracy, the share whose better response scores strictly higher;
    score_gap, the mean of better - worse; loss, the ranking loss."""

    accuracy: float
    score_gap: float
    loss: float


@dataclass(frozen=True)
class RewardResult:
    """The evaluations before and after training."""

    before: Evaluation
    after: Evaluation
    seconds: float


class RewardTrainer:
    """Trains `engine`, a ScalarModel under DeepSpeed, on ranked responses."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[ResponsesRow],
        eval_rows: Sequence[ResponsesRow],
        settings: LoopSettings,
        metrics: MetricsWriter,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.settings = settings
        self.metrics = metrics
        self.ranks = engine.ranks

    def train(self) -> RewardResult:
        """Take every optimizer step; return the evaluations before and after."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 2, reward model", self.ranks.is_main) as bar:
            for step in range(1, settings.total_steps + 1):
                taken = stream.take((step - 1) * settings.items_per_step, settings.items_per_step)
                figures = self._optimizer_step([self.train_rows[row] for row in taken])
                self.metrics.write(step, figures)
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
        return RewardResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> Evaluation:
        """Return (and record) how the model ranks the evaluation rows."""
        self.engine.eval()
        sums = {"pairs": 0.0, "right": 0.0, "gap": 0.0, "loss": 0.0}
        with torch.no_grad():
            for batch in self._micro_batches(self.eval_rows, self.settings.eval_plan):
                better_Q, worse_Q = self._scores(batch)
                sums["pairs"] += better_Q.numel()
                sums["right"] += float((better_Q > worse_Q).sum())
                sums["gap"] += float((better_Q - worse_Q).sum())
                sums["loss"] += float(ranking_loss(better_Q, worse_Q, batch.weight_Q, 1.0))
        totals = summed_numbers(sums, self.ranks.device)
        result = Evaluation(
            accuracy=totals["right"] / totals["pairs"],
            score_gap=totals["gap"] / totals["pairs"],
            loss=totals["loss"] / len(self.eval_rows),
        )
        self.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        return result

    def _optimizer_step(self, batch: Sequence[ResponsesRow]) -> dict[str, float]:
        started = time.monotonic()
        sums = {"loss": 0.0, "pairs": 0.0, "right": 0.0}
        self.engine.train()
        for micro_batch in self._micro_batches(batch, self.settings.train_plan):
            better_Q, worse_Q = self._scores(micro_batch)
            loss = ranking_loss(better_Q, worse_Q, micro_batch.weight_Q, float(len(batch)))
            self.engine.backward(loss)
            sums["loss"] += float(loss.detach())
            sums["pairs"] += better_Q.numel()
            sums["right"] += float((better_Q > worse_Q).sum())
        report = self.engine.step()
        totals = summed_numbers(sums, self.ranks.device)
        seconds = time.monotonic() - started
        shared = self.settings.train_plan.packed
        tokens = sum(real_tokens(len(row.prompt_ids), _lengths(row), shared) for row in batch)
        return {
            "train/loss": totals["loss"],
            "train/accuracy": totals["right"] / totals["pairs"],
            "train/pairs_per_second": totals["pairs"] / seconds,
            "train/tokens_per_second": tokens / seconds,
            **self._mfu(batch, seconds),
            **report.figures("train"),
        }

    def _mfu(self, batch: Sequence[ResponsesRow], seconds: float) -> dict[str, float]:
        meter = self.settings.meter
        if meter is None:
            return {}
        documents = [responses_document(row, are_targets=False) for row in batch]
        if not self.settings.train_plan.packed:
            documents = [alone for document in documents for alone in unshared(document)]
        return {"train/mfu": meter.mfu(documents, sum(len(document.ends) for document in documents), seconds)}

    def _scores(self, batch: RankedRows) -> tuple[torch.Tensor, torch.Tensor]:
        scores_B = self.engine(batch.rows)
        return scores_B.index_select(0, batch.better_Q), scores_B.index_select(0, batch.worse_Q)

    def _micro_batches(self, batch: Sequence[ResponsesRow], plan: PlanSettings) -> list[RankedRows]:
        """This rank's share of `batch`, laid out; the same number of micro-batches on every rank."""
        shared = plan.packed
        lengths = [planned_tokens(len(row.prompt_ids), _lengths(row), shared) for row in batch]
        documents = [responses_document(row, are_targets=False) for row in batch]
        return [
            ranked_rows([[documents[index] for index in row] for row in rows], shared, self.settings.pad_token_id).to(
                self.ranks.device
            )
            for rows in plan_step(lengths, plan).micro_batches[self.ranks.rank]
        ]


def _lengths(row: ResponsesRow) -> list[int]:
    return [len(ids) for ids in row.response_ids]
