"""Step 1's loop: batches of chosen sentences, their negative log-likelihood, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.step1_sft.loss import sft_loss
from training.utils.data.documents import sentence_document
from training.utils.data.phases import SentenceRow
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.run.metrics import MetricsWriter, progress_bar, show


@dataclass(frozen=True)
class SftResult:
    """Evaluation loss in nats a target token, before and after training."""

    eval_loss_before: float
    eval_loss_after: float
    seconds: float


class SftTrainer:
    """Trains `engine`, a PolicyModel under DeepSpeed, on sentences."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[SentenceRow],
        eval_rows: Sequence[SentenceRow],
        settings: LoopSettings,
        metrics: MetricsWriter,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.settings = settings
        self.metrics = metrics
        self.ranks = engine.ranks

    def train(self) -> SftResult:
        """Take every optimizer step; return the losses on the evaluation rows."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 1, SFT", self.ranks.is_main) as bar:
            for step in range(1, settings.total_steps + 1):
                taken = stream.take((step - 1) * settings.items_per_step, settings.items_per_step)
                figures = self._optimizer_step([self.train_rows[row] for row in taken])
                self.metrics.write(step, figures)
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
        return SftResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> float:
        """Return (and record) the mean loss a target token over all evaluation rows."""
        self.engine.eval()
        sums = {"loss": 0.0, "targets": 0.0}
        with torch.no_grad():
            for rows in self._micro_batches(self.eval_rows, self.settings.eval_plan):
                logprobs_M = self.engine(rows).logprobs_M
                sums["loss"] -= float(logprobs_M.sum())
                sums["targets"] += logprobs_M.numel()
        totals = summed_numbers(sums, self.ranks.device)
        loss = totals["loss"] / totals["targets"]
        self.metrics.write(step, {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 50.0))})
        return loss

    def _optimizer_step(self, batch: Sequence[SentenceRow]) -> dict[str, float]:
        started = time.monotonic()
        # Every rank holds the whole batch's masks, so the global count needs no collective.
        targets = float(sum(int(row.loss_mask.sum()) for row in batch))
        sums = {"loss": 0.0}
        self.engine.train()
        for rows in self._micro_batches(batch, self.settings.train_plan):
            loss = sft_loss(self.engine(rows).logprobs_M, targets)
            self.engine.backward(loss)
            sums["loss"] += float(loss.detach())
        report = self.engine.step()
        total_loss = summed_numbers(sums, self.ranks.device)["loss"]
        seconds = time.monotonic() - started
        tokens = sum(len(row.input_ids) for row in batch)
        return {
            "train/loss": total_loss,
            "train/tokens_per_second": tokens / seconds,
            **report.figures("train"),
        }

    def _micro_batches(self, batch: Sequence[SentenceRow], plan: PlanSettings) -> list[TokenRows]:
        """This rank's share of `batch`, laid out; the same number of micro-batches on every rank."""
        documents = [sentence_document(row) for row in batch]
        mine = plan_step([document.tokens for document in documents], plan).micro_batches[self.ranks.rank]
        pad = self.settings.pad_token_id
        return [
            packed_rows([[documents[index] for index in row] for row in rows], pad).to(self.ranks.device)
            for rows in mine
        ]
