"""The reference: what the policy said of each response before it was trained.

Its log-probabilities are read once, by the model that is about to be trained (new LoRA adapters add nothing, so that
they make no difference), and kept in a file (`reference_file`). Or, with LoRA, they are read in each step by the model
with its adapters off.

R rows, K responses of a row, B sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from training.step2_dpo.batches import PairBatch, all_pair_batches
from training.step2_dpo.loss import sequence_sums
from training.step2_dpo.reference_file import ReferenceFile, RowLogprobs
from training.utils.data.phases import ResponsesRow
from training.utils.engine.collectives import from_main, summed
from training.utils.engine.loop import LoopSettings
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings
from training.utils.models.lora import adapters_off, is_adapter_tensor
from training.utils.run.errors import ThreestepError
from training.utils.run.metrics import MetricsWriter, progress_bar

# PairBatch -> float32 [B], the summed log-probability of each of its sequences.
Reference = Callable[[PairBatch], torch.Tensor]


class References(NamedTuple):
    """Of the training rows, and of the evaluation rows."""

    train: Reference
    eval: Reference


@dataclass(frozen=True)
class Known:
    """Log-probabilities read before training."""

    logprobs: RowLogprobs
    device: torch.device

    def __call__(self, batch: PairBatch) -> torch.Tensor:
        return torch.tensor(self.logprobs.of(batch.row_B, batch.place_B), device=self.device)


@dataclass(frozen=True)
class AdapterOff:
    """`model`, which `engine` trains, with its adapters off. Call it in eval mode and without gradients."""

    engine: TrainingEngine
    model: PreTrainedModel

    def __call__(self, batch: PairBatch) -> torch.Tensor:
        with adapters_off(self.model):
            return read_sequences(self.engine, batch)


def read_sequences(engine: TrainingEngine, batch: PairBatch) -> torch.Tensor:
    """Return float32 [B], the log-probability of each response, summed over its tokens."""
    rows = batch.ranked.rows
    return sequence_sums(engine(rows).logprobs_M, rows.sequence_M, rows.end_B.numel())


def read_rows(
    engine: TrainingEngine,
    rows: Sequence[ResponsesRow],
    indices: Sequence[int],
    plan: PlanSettings,
    pad_token_id: int,
    name: str,
) -> RowLogprobs:
    """Read the rows `indices` (ascending) with the model as it is. A collective; every rank gets all of them."""
    most = max((len(rows[index].response_ids) for index in indices), default=0)
    numbers = np.array(indices, dtype=np.int64)
    logprobs_RK = torch.zeros(len(indices), most, dtype=torch.float32, device=engine.ranks.device)
    engine.eval()
    with torch.no_grad(), progress_bar(len(indices), name, engine.ranks.is_main, unit="row") as bar:
        for batch in all_pair_batches(rows, indices, plan, engine.ranks, pad_token_id):
            places = (np.searchsorted(numbers, batch.row_B), batch.place_B)
            logprobs_RK[tuple(map(torch.from_numpy, places))] = read_sequences(engine, batch)
            bar.update(min(plan.ranks * len(np.unique(batch.row_B)), bar.total - bar.n))  # ranks have about as many
    return RowLogprobs(numbers, summed(logprobs_RK).cpu().numpy())


def taken_rows(rows: int, settings: LoopSettings) -> list[int]:
    """The rows that the run will train on, ascending: all of them, but for a run shorter than an epoch."""
    positions = min(settings.total_steps * settings.items_per_step, rows)
    return sorted(ShuffledStream(rows, settings.seed).take(0, positions))


def known_references(
    engine: TrainingEngine,
    train_rows: Sequence[ResponsesRow],
    eval_rows: Sequence[ResponsesRow],
    settings: LoopSettings,
    file: ReferenceFile | None,
    metrics: MetricsWriter,
    say: Callable[..., None],
) -> References:
    """Log-probabilities of every row that the run will take: out of `file`, and what it lacks by the model as it is.

    file: on rank 0 alone; what is read now is kept in it. A collective.
    """
    started = time.monotonic()
    kept, reason = file.read() if file is not None else ({}, "")
    kept = from_main(kept)
    found: dict[str, RowLogprobs] = {}
    rows_read = pairs_read = 0
    for split, rows, indices in (
        ("train", train_rows, taken_rows(len(train_rows), settings)),
        ("eval", eval_rows, list(range(len(eval_rows)))),
    ):
        found[split] = kept.get(split, RowLogprobs.none())
        missing = found[split].lacking(indices)
        if missing:
            name = f"step 2, reference of {split} rows"
            new = read_rows(engine, rows, missing, settings.eval_plan, settings.pad_token_id, name)
            found[split] = found[split].joined(new)
        rows_read += len(missing)
        pairs_read += sum(math.comb(len(rows[index].response_ids), 2) for index in missing)
    if rows_read:
        seconds = time.monotonic() - started
        metrics.write(0, {"reference/pairs_per_second": pairs_read / seconds})
    if file is not None and rows_read:
        file.write(found)
        why = "these rows were not read before" if kept else reason
        say(f"reference: read {rows_read:,} rows in {seconds:.1f} s ({why}); {file.path}")
    elif file is not None:
        say(f"reference: resumed {sum(len(known.rows_R) for known in found.values()):,} rows; {file.path}")
    device = engine.ranks.device
    return References(Known(found["train"], device), Known(found["eval"], device))


def adapter_off_references(engine: TrainingEngine, model: PreTrainedModel) -> References:
    """Nothing is read before training. model: with LoRA adapters, inside `engine`. ThreestepError where more than they
    trains: embeddings that have just gained tokens."""
    others = [name for name, part in model.named_parameters() if part.requires_grad and not is_adapter_tensor(name)]
    if others:
        raise ThreestepError(
            f"--reference adapter_off needs a model of which nothing but the adapters trains, and {others[0]} trains "
            "for the tokens that the tokenizer lacked; start from a model that has them or use --reference cached"
        )
    return References(AdapterOff(engine, model), AdapterOff(engine, model))
