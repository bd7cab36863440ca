"""Step 2's loop: batches of ranked responses, their scores, the ranking loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from training.step2_reward.batches import RankedBatch, computed_tokens, ranked_batches
from training.step2_reward.evaluation import Evaluation, Spread, evaluate, evaluation_from, spread
from training.step2_reward.loss import LossOptions, ranking_loss
from training.step2_reward.scoring import chosen_alone, score_responses
from training.utils.data.documents import responses_document
from training.utils.data.phases import ResponsesRow
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.checkpoints import Checkpoints
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.documents import unshared
from training.utils.layout.order import ShuffledStream
from training.utils.run.metrics import MetricsWriter, progress_bar, show
from training.utils.run.traces import traced


@dataclass(frozen=True)
class RewardResult:
    """The evaluations before and after training."""

    before: Evaluation
    after: Evaluation
    seconds: float

    def summary(self) -> dict[str, float | None]:
        """The run's closing figures."""
        return {
            "eval_accuracy_before": self.before.accuracy,
            "eval_accuracy": self.after.accuracy,
            "eval_score_gap": self.after.score_gap,
            "eval_loss": self.after.loss,
            "seconds": self.seconds,
        }


class RewardTrainer:
    """Trains `engine`, a ScalarModel under DeepSpeed, on ranked responses."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[ResponsesRow],
        eval_rows: Sequence[ResponsesRow],
        settings: LoopSettings,
        metrics: MetricsWriter,
        options: LossOptions = LossOptions(),  # noqa: B008 (frozen, and the plain loss)
        checkpoints: Checkpoints | None = None,
        bad_steps: BadSteps | None = None,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.settings = settings
        self.metrics = metrics
        self.checkpoints = checkpoints or Checkpoints()
        self.bad_steps = bad_steps or BadSteps()
        self.options = options
        self.ranks = engine.ranks

    def train(self) -> RewardResult:
        """Take every optimizer step; return the evaluations before and after."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        done, saved = self.checkpoints.restore()
        if saved:
            before, after = (evaluation_from(saved[name]) for name in ("before", "after"))
        else:
            before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 2, reward model", self.ranks.is_main, done=done) as bar:
            for step in traced(range(done + 1, settings.total_steps + 1), settings.traces, self.ranks.rank):
                taken = stream.take((step - 1) * settings.items_per_step, settings.items_per_step)
                batch = [self.train_rows[row] for row in taken]
                figures = self._optimizer_step(batch)
                self.metrics.write(step, figures)
                self.bad_steps.check(step, figures, [row.row_id for row in batch])
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
                if self.checkpoints.due(step, settings.total_steps):
                    self.checkpoints.save(step, {"before": asdict(before), "after": asdict(after)})
        return RewardResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> Evaluation:
        """Return (and record) how the model ranks the evaluation rows."""
        self.engine.eval()
        settings = self.settings
        result = evaluate(
            score_responses(self.engine, self.eval_rows, settings.eval_plan, settings.pad_token_id, self.ranks)
        )
        self.metrics.write(step, {f"eval/{name}": value for name, value in result.figures().items()})
        return result

    def chosen_scores(self, most_rows: int) -> Spread | None:
        """How the chosen responses of at most `most_rows` training rows, drawn by the seed, score; None of no rows."""
        self.engine.eval()
        settings = self.settings
        drawn = ShuffledStream(len(self.train_rows), settings.seed).take(0, min(most_rows, len(self.train_rows)))
        rows = chosen_alone([self.train_rows[row] for row in drawn])
        return spread(score_responses(self.engine, rows, settings.eval_plan, settings.pad_token_id, self.ranks).score_R)

    def _optimizer_step(self, rows: Sequence[ResponsesRow]) -> dict[str, float]:
        started = time.monotonic()
        settings = self.settings
        sums = {"loss": 0.0, "pairs": 0.0, "right": 0.0}
        self.engine.train()
        for batch in ranked_batches(
            rows, settings.train_plan, self.ranks.rank, settings.pad_token_id, self.ranks.device
        ):
            better_Q, worse_Q = self._scores(batch)
            loss = ranking_loss(
                better_Q, worse_Q, batch.margin_Q, batch.ranked.weight_Q, float(len(rows)), self.options
            )
            self.engine.backward(loss)
            sums["loss"] += float(loss.detach())
            sums["pairs"] += better_Q.numel()
            sums["right"] += float((better_Q > worse_Q).sum())
        report = self.engine.step()
        totals = summed_numbers(sums, self.ranks.device)
        seconds = time.monotonic() - started
        return {
            "train/loss": totals["loss"],
            "train/accuracy": totals["right"] / totals["pairs"],
            "train/pairs_per_second": totals["pairs"] / seconds,
            "train/tokens_per_second": sum(computed_tokens(row, settings.train_plan) for row in rows) / seconds,
            **self._mfu(rows, seconds),
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

    def _scores(self, batch: RankedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        scores_B = self.engine(batch.ranked.rows)
        return scores_B.index_select(0, batch.ranked.better_Q), scores_B.index_select(0, batch.ranked.worse_Q)
