"""Step 1's loop: batches of chosen sentences, their negative log-likelihood, evaluation.

Knows neither flags nor files; what it needs comes as arguments.

N rows, T tokens in a row, E width of the embeddings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from training.step1_sft.loss import sft_loss, z_loss
from training.step1_sft.neftune import embedding_noise
from training.step1_sft.settings import SftSettings
from training.utils.data.documents import sentence_document
from training.utils.data.phases import SentenceRow
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.checkpoints import Checkpoints
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.documents import Document
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.run.metrics import MetricsWriter, progress_bar, show
from training.utils.run.seeds import derived_seed
from training.utils.run.traces import traced


@dataclass(frozen=True)
class Evaluation:
    """Over the target tokens of the evaluation rows: loss in nats a token; perplexity, its exponential (of at most
    50); token_accuracy, the share that is the model's first choice, the tokens before it given."""

    loss: float
    perplexity: float
    token_accuracy: float


@dataclass(frozen=True)
class SftResult:
    """The evaluations before and after training; None where there are no evaluation rows."""

    before: Evaluation | None
    after: Evaluation | None
    seconds: float

    def summary(self) -> dict[str, float | None]:
        """The run's closing figures."""
        before, after = ({} if one is None else vars(one) for one in (self.before, self.after))
        return {
            "eval_loss_before": before.get("loss"),
            "eval_loss_after": after.get("loss"),
            "eval_token_accuracy_before": before.get("token_accuracy"),
            "eval_token_accuracy": after.get("token_accuracy"),
            "seconds": self.seconds,
        }

    def sentence(self) -> str:
        """The same in words."""
        before, after = self.before, self.after
        if before is None or after is None:
            return "trained, without evaluation rows,"
        return (
            f"evaluation loss {before.loss:.3f} -> {after.loss:.3f} nats a token, token accuracy "
            f"{before.token_accuracy:.3f} -> {after.token_accuracy:.3f},"
        )


@dataclass(frozen=True)
class MicroBatch:
    """rows: one forward. taken: the place in the step's batch of each of its sequences, in the rows' order."""

    rows: TokenRows
    taken: tuple[int, ...]


class SftTrainer:
    """Trains `engine`, a PolicyModel under DeepSpeed, on sentences."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[SentenceRow],
        eval_rows: Sequence[SentenceRow],
        settings: LoopSettings,
        metrics: MetricsWriter,
        sft: SftSettings,
        checkpoints: Checkpoints | None = None,
        bad_steps: BadSteps | None = None,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.settings = settings
        self.metrics = metrics
        self.sft = sft
        self.checkpoints = checkpoints or Checkpoints()
        self.bad_steps = bad_steps or BadSteps()
        self.ranks = engine.ranks

    def train(self) -> SftResult:
        """Take every optimizer step; return the evaluations before and after."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        done, saved = self.checkpoints.restore()
        if saved:
            before, after = (saved[name] and Evaluation(**saved[name]) for name in ("before", "after"))
        else:
            before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 1, SFT", self.ranks.is_main, done=done) as bar:
            for step in traced(range(done + 1, settings.total_steps + 1), settings.traces, self.ranks.rank):
                first = (step - 1) * settings.items_per_step
                taken = stream.take(first, settings.items_per_step)
                batch = [self.train_rows[row] for row in taken]
                figures = self._optimizer_step(batch, first)
                self.metrics.write(step, figures)
                self.bad_steps.check(step, figures, [row.row_id for row in batch])
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
                if self.checkpoints.due(step, settings.total_steps):
                    self.checkpoints.save(step, {"before": before and asdict(before), "after": after and asdict(after)})
        return SftResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> Evaluation | None:
        """Return (and record) how the model predicts the evaluation rows, without noise; None where there are none."""
        if not len(self.eval_rows):
            return None
        self.engine.eval()
        documents = [sentence_document(row) for row in self.eval_rows]
        sums = {"loss": 0.0, "targets": 0.0, "right": 0.0}
        with torch.no_grad():
            for micro_batch in self._micro_batches(documents, self.settings.eval_plan):
                read = self.engine(micro_batch.rows)
                sums["loss"] += float(sft_loss(read.logprobs_M, 1.0))
                sums["targets"] += read.logprobs_M.numel()
                sums["right"] += float(read.is_greedy_M.sum())
        totals = summed_numbers(sums, self.ranks.device)
        loss = totals["loss"] / totals["targets"]
        result = Evaluation(loss, math.exp(min(loss, 50.0)), totals["right"] / totals["targets"])
        self.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        return result

    def _optimizer_step(self, batch: Sequence[SentenceRow], first: int) -> dict[str, float]:
        """first: the place of the batch's first row in the stream of the whole run."""
        started = time.monotonic()
        # Every rank holds the whole batch's masks, so the global count needs no collective.
        targets = sum(int(row.loss_mask.sum()) for row in batch)
        documents = [sentence_document(row) for row in batch]
        sums = {"loss": 0.0, "z_loss": 0.0, "right": 0.0}
        self.engine.train()
        for micro_batch in self._micro_batches(documents, self.settings.train_plan):
            read = self.engine(micro_batch.rows, noise_NTE=self._noise(micro_batch, first))
            loss = nll = sft_loss(read.logprobs_M, targets)
            if self.sft.z_loss_coef:
                drift = z_loss(read.log_normalizers_M, targets)
                loss = nll + self.sft.z_loss_coef * drift
                sums["z_loss"] += float(drift.detach())
            self.engine.backward(loss)
            sums["loss"] += float(nll.detach())
            sums["right"] += float(read.is_greedy_M.sum())
        report = self.engine.step()
        totals = summed_numbers(sums, self.ranks.device)
        seconds = time.monotonic() - started
        figures = {
            "train/loss": totals["loss"],
            "train/token_accuracy": totals["right"] / targets,
            "train/tokens_per_second": sum(document.tokens for document in documents) / seconds,
            **report.figures("train"),
        }
        if self.sft.z_loss_coef:
            figures["train/z_loss"] = totals["z_loss"]
        if self.settings.meter is not None:
            figures["train/mfu"] = self.settings.meter.mfu(documents, targets, seconds)
        return figures

    def _noise(self, micro_batch: MicroBatch, first: int) -> torch.Tensor | None:
        """NEFTune's, from a seed of each sequence's place in the run: the layout changes nothing."""
        if not self.sft.neftune_alpha:
            return None
        seeds = [derived_seed(self.settings.seed, "neftune", first + index) for index in micro_batch.taken]
        policy: Any = self.engine.module
        return embedding_noise(micro_batch.rows, seeds, self.sft.neftune_alpha, policy.embedding_width)

    def _micro_batches(self, documents: Sequence[Document], plan: PlanSettings) -> list[MicroBatch]:
        """This rank's share of `documents`, laid out; the same number of micro-batches on every rank."""
        mine = plan_step([document.tokens for document in documents], plan).micro_batches[self.ranks.rank]
        pad = self.settings.pad_token_id
        return [
            MicroBatch(
                packed_rows([[documents[index] for index in row] for row in rows], pad).to(self.ranks.device),
                tuple(index for row in rows for index in row),
            )
            for rows in mine
        ]
