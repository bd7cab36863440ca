"""Step 1's loop: batches of chosen sentences, their negative log-likelihood, evaluation.

Knows neither flags nor files; what it needs comes as arguments.

N rows, T tokens in a row, E width of the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from training.step1_sft.loss import sft_loss
from training.step1_sft.regularizer import Regularizer
from training.utils.base.seeds import derived_seed
from training.utils.base.transfer import moved, pinned
from training.utils.contracts.run import StepTaken
from training.utils.data.rows.documents import group_document, group_size, row_groups, sentence_document
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, on_device
from training.utils.engine.ranks.collectives import DeviceSums, gathered
from training.utils.layout.planner import DocumentSize, PlanSettings, plain_size, plan_step
from training.utils.layout.rows import lacks_media, laid_out, sequence_sums
from training.utils.run.divergence import Uniform
from training.utils.setup.training_run import NextStep, TrainingLoop, TrainingRun

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.rows import SentenceRow
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import TokenLogprobs
    from training.utils.setup.training_run import TrainingResult


@dataclass(frozen=True)
class SftEvaluation:
    """Over the target tokens of the evaluation rows.

    loss: nats per token
    perplexity: the exponential of the loss, of at most 50
    token_accuracy: share that is the model's first choice, given the tokens before; a tie is wrong
    """

    loss: float
    perplexity: float
    token_accuracy: float

    @property
    def in_words(self) -> str:
        return (
            f"loss {self.loss:.3f} nats per token, perplexity {self.perplexity:.4g}, token accuracy "
            f"{self.token_accuracy:.3f}"
        )


def closing_figures(before: SftEvaluation | None, after: SftEvaluation | None) -> dict[str, float | None]:
    """Figures of the evaluations before and after training; None without evaluation rows."""
    return {
        "eval_loss_before": getattr(before, "loss", None),
        "eval_loss_after": getattr(after, "loss", None),
        "eval_token_accuracy_before": getattr(before, "token_accuracy", None),
        "eval_token_accuracy": getattr(after, "token_accuracy", None),
    }


def closing_sentence(before: SftEvaluation, after: SftEvaluation) -> str:
    """Return the closing figures as one sentence."""
    return (
        f"evaluation loss {before.loss:.3f} -> {after.loss:.3f} nats per token, token accuracy "
        f"{before.token_accuracy:.3f} -> {after.token_accuracy:.3f}"
    )


@dataclass(frozen=True)
class SentenceBatch:
    """rows: one forward. taken: each sequence's place in the step's batch, in the order of the rows; documents: as
    they were before they were laid out."""

    rows: TokenRows
    taken: tuple[int, ...]
    documents: tuple[Document, ...]
    for_guests: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SentenceStep:
    """batch: of all ranks. micro_batches: this rank's, on the CPU. targets: of all ranks. counted: by the guests. work:
    this rank's, as in `TrainingRun.work_of`."""

    batch: list[SentenceRow]
    micro_batches: list[SentenceBatch]
    targets: int
    counted: tuple[Any, ...]
    work: dict[str, float]


@dataclass(frozen=True)
class SftStep(StepTaken):
    """regularizer: as of SftTrainer."""

    kind: ClassVar[str] = "sft"

    prepared: SentenceStep
    regularizer: Regularizer


def _row_losses(micro_batch: SentenceBatch, logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return [B], each sequence's loss in nats per token."""
    sequence_M, count = micro_batch.rows.sequence_M, len(micro_batch.taken)
    targets_B = sequence_sums(torch.ones_like(logprobs_M), sequence_M, count)
    return -sequence_sums(logprobs_M, sequence_M, count) / targets_B


class SftTrainer:
    """Train `run.engine`, a PolicyModel under DeepSpeed, on sentences. The weight of their likelihood is the guests'
    `own_loss_weight`."""

    def __init__(self, run: TrainingRun[SentenceRow], regularizer: Regularizer | None = None) -> None:
        self.run = run
        self.regularizer = regularizer or Regularizer()

    @property
    def _policy(self) -> Any:
        return self.run.engine.module

    def train(self) -> TrainingResult:
        """Take every optimizer step."""
        vocabulary = self._policy.vocabulary
        uniform = Uniform(math.log(vocabulary), f"all {vocabulary:,} tokens")
        self.run.guests.open_rows((self.run.train_rows, self.run.eval_rows), self._laid_out)
        loop = TrainingLoop(self.run, self.evaluate, lambda saved: SftEvaluation(**saved), uniform)
        for step in loop.steps(self._prepared):
            loop.record(step.number, self._optimizer_step(step), step.taken)
        return loop.result(closing_figures, closing_sentence)

    def _laid_out(self, rows: Sequence[SentenceRow]) -> Iterator[TokenRows]:
        """Yield this rank's share of `rows`, as an evaluation lays them out, on the device."""
        for part in self._micro_batches(rows, self.run.settings.eval_plan):
            yield moved(part.rows, self.run.ranks.device)

    def evaluate(self, step: int) -> SftEvaluation | None:
        """Return (and record) how the model predicts the evaluation rows, without noise; None without such rows."""
        run = self.run
        if not len(run.eval_rows):
            return None
        run.engine.eval()
        sums, wanted = DeviceSums(), frozenset(run.sampled_rows(step))
        read_of = list[tuple[tuple[int, ...], torch.Tensor]]()  # losses of rows, on the device
        with torch.no_grad():
            for on_host in self._micro_batches(run.eval_rows, run.settings.eval_plan):
                [micro_batch] = on_device([on_host], run.ranks.device)
                read = run.engine(micro_batch.rows, **run.guests.forward_kwargs(micro_batch.for_guests))
                loss, right = sft_loss(read.logprobs_M, 1.0), read.is_greedy_M.sum()
                sums.add({"loss": loss, "targets": read.logprobs_M.numel(), "right": right})
                sums.add(run.guests.evaluate(read, micro_batch.for_guests))
                if not wanted.isdisjoint(micro_batch.taken):
                    read_of.append((micro_batch.taken, _row_losses(micro_batch, read.logprobs_M)))
        totals = sums.totals(run.ranks.device, run.ranks.leads)
        mean = totals["loss"] / totals["targets"]
        result = SftEvaluation(mean, math.exp(min(mean, 50.0)), totals["right"] / totals["targets"])
        figures = {f"eval/{name}": value for name, value in vars(result).items()}
        run.metrics.write(step, figures | run.guests.evaluated("eval", totals))
        if wanted:
            losses = {
                row: [loss]
                for taken, losses_B in read_of
                for row, loss in zip(taken, losses_B.tolist(), strict=True)
                if row in wanted
            }
            run.write_samples(step, {row: loss for part in gathered(losses) for row, loss in part.items()})
        return result

    def _prepared(self, taken: Sequence[int]) -> SentenceStep:
        run = self.run
        batch = [run.train_rows[index] for index in taken]
        # Every rank holds the whole batch's masks, so the global count needs no collective.
        targets = sum(int(row.loss_mask.sum()) for row in batch)
        micro_batches = self._micro_batches(batch, run.settings.train_plan)
        own = [document for part in micro_batches for document in part.documents]
        work = run.work_of(own, sum(document.reads for document in own))
        counted = run.guests.tally([sentence_document(row) for row in batch]) if run.guests else ()
        return SentenceStep(batch, micro_batches, targets, counted, work)

    def _optimizer_step(self, step: NextStep[SentenceStep]) -> dict[str, float]:
        run, prepared = self.run, step.ready()

        def read(batch: SentenceBatch, rows: TokenRows, **more: Any) -> TokenLogprobs:
            return run.engine(rows, noise_NTE=self._noise(batch, step.number), **more)

        def loss_of(batch: SentenceBatch) -> MicroLoss:
            logprobs = read(batch, batch.rows, **run.guests.forward_kwargs(batch.for_guests))
            nll = sft_loss(logprobs.logprobs_M, prepared.targets)
            loss, figures = run.guests.own_loss_weight * nll, {"loss": nll, "right": logprobs.is_greedy_M.sum()}
            for name, added in self.regularizer.added(logprobs, prepared.targets).items():
                loss, figures[name] = loss + added.weight * added.term, added.term
            return MicroLoss(loss, figures, logprobs)

        micro_batches = [
            MicroBatch(batch.rows, partial(loss_of, batch), batch.for_guests, partial(read, batch))
            for batch in on_device(prepared.micro_batches, run.ranks.device)
        ]
        seen = partial(SftStep, prepared=prepared, regularizer=self.regularizer)
        trainee = Trainee("train", run.engine, micro_batches, run.guests, prepared.counted)
        totals, figures = run.take(step, trainee, prepared.work, seen)
        return {
            "train/loss": totals["loss"],
            "train/token_accuracy": totals["right"] / prepared.targets,
            **figures,
            **{f"train/{name}": totals[name] for name in self.regularizer.losses},
        }

    def _noise(self, micro_batch: SentenceBatch, step: int) -> torch.Tensor | None:
        """The regularizer's noise. Its seeds are the sequences' places in the run: the layout changes nothing."""
        if not self.regularizer.draws_noise:
            return None
        settings = self.run.settings
        first = (step - 1) * settings.items_per_step
        seeds = [derived_seed(settings.seed, "neftune", first + index) for index in micro_batch.taken]
        return self.regularizer.noise(micro_batch.rows, seeds, self._policy.embedding_width)

    def _micro_batches(self, sentences: Sequence[SentenceRow], plan: PlanSettings) -> list[SentenceBatch]:
        """This rank's share of `sentences`, laid out on the CPU; the same number of micro-batches on every rank."""
        run, ranks = self.run, self.run.ranks
        places = row_groups(sentences, plan)
        groups = [[sentences[place] for place in group] for group in places]
        sizes = [_size(group, plan) for group in groups]
        step = plan_step([size.tokens for size in sizes], plan, pairs=[size.pairs for size in sizes])
        lacking = lacks_media(step, ranks.group, [any(row.media for row in group) for group in groups])
        found = []
        for rows, lacks in zip(step[ranks.group], lacking, strict=True):
            documents = [[_document(groups[number], plan) for number in row] for row in rows]
            token_rows = laid_out(
                documents, run.settings.pad_token_id, run.settings.media, lacks, with_before=run.guests.needs_before
            )
            found.append(
                SentenceBatch(
                    pinned(token_rows, ranks.device),
                    tuple(place for row in rows for number in row for place in places[number]),
                    tuple(document for row in documents for document in row),
                    pinned(run.guests.prepare(token_rows), ranks.device),
                )
            )
        return found


def _size(rows: Sequence[SentenceRow], plan: PlanSettings) -> DocumentSize:
    """The size of the `_document` of these rows."""
    return plain_size(rows[0].length_tokens) if len(rows) == 1 else group_size(rows, plan)


def _document(rows: Sequence[SentenceRow], plan: PlanSettings) -> Document:
    return sentence_document(rows[0]) if len(rows) == 1 else group_document(rows, plan)
