"""The reference: log-probabilities of each response under the policy before training.

They are read once by the model that is then trained (new adapters change nothing) and stored in a file next to the
tokenized data: safetensors, named by a fingerprint of the inputs that they depend on, which its header holds in clear;
published by one rename. Or, with adapters, the model reads them in each step with its adapters off.

R rows, K responses of a row, B sequences.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import flush_to_disk
from training.utils.base.transfer import moved, pinned
from training.utils.data.files.digests import digest_files, hash_parts
from training.utils.engine.ranks.collectives import from_main, summed
from training.utils.layout.order import ShuffledStream
from training.utils.layout.rows import beyond_shortest, sequence_sums
from training.utils.loading.configurations import model_files
from training.utils.models.weights import adapters_of
from training.utils.preference.batches import PreferenceBatch, mismatched, preference_batches
from training.utils.run.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rows import ResponsesRow
    from training.utils.data.arguments import DataArguments
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.settings import ModelSettings
    from training.utils.setup.flags import OneModelFlags
    from training.utils.setup.training_run import LoopSettings, TrainingRun

FORMAT = "1"


@dataclass(frozen=True)
class RowLogprobs:
    """rows_R: int64, row numbers of a split, ascending. logprobs_RK: float32, the summed log-probability of each of a
    row's responses, best first; 0 where a row has fewer than K."""

    rows_R: np.ndarray
    logprobs_RK: np.ndarray

    @classmethod
    def none(cls) -> RowLogprobs:
        return cls(np.zeros(0, np.int64), np.zeros((0, 0), np.float32))

    def of(self, row_B: np.ndarray, place_B: np.ndarray) -> np.ndarray:
        """Return float32 [B]: of response `place_B` of row `row_B`."""
        at_B = np.searchsorted(self.rows_R, row_B)
        if not np.array_equal(self.rows_R[np.minimum(at_B, len(self.rows_R) - 1)], row_B):
            raise AssertionError("a row was not read by the reference")
        return self.logprobs_RK[at_B, place_B]

    def lacking(self, rows: Sequence[int]) -> list[int]:
        """The missing ones of `rows` (ascending)."""
        return np.setdiff1d(np.array(rows, dtype=np.int64), self.rows_R).tolist()

    def joined(self, other: RowLogprobs) -> RowLogprobs:
        """The rows of both, which share none."""
        rows_R = np.concatenate([self.rows_R, other.rows_R])
        most = max(self.logprobs_RK.shape[1], other.logprobs_RK.shape[1])
        wide = [np.pad(part.logprobs_RK, ((0, 0), (0, most - part.logprobs_RK.shape[1]))) for part in (self, other)]
        order = np.argsort(rows_R)
        return RowLogprobs(rows_R[order], np.concatenate(wide)[order])


@dataclass(frozen=True)
class ReferenceFile:
    """The file of the numbers that depend on `parts`. rebuild: ignore its content."""

    folder: str
    parts: dict[str, str]
    rebuild: bool = False

    @property
    def path(self) -> Path:
        return Path(self.folder) / f"reference-{hash_parts(self.parts)[:20]}.safetensors"

    def read(self) -> tuple[dict[str, RowLogprobs], str]:
        """Return the stored splits, or none and the reason."""
        if self.rebuild:
            return {}, "--rebuild_cache is set"
        if not self.path.exists():
            return {}, self._difference()
        content = _open(self.path)
        if content is None or content[0] != self.parts:
            return {}, "the cached file was damaged"
        return content[1], ""

    def write(self, splits: dict[str, RowLogprobs]) -> None:
        """Replace the content by `splits`."""
        from safetensors.numpy import save_file

        tensors = {}
        for split, known in splits.items():
            tensors[f"{split}.rows"] = np.ascontiguousarray(known.rows_R)
            tensors[f"{split}.logprobs"] = np.ascontiguousarray(known.logprobs_RK)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        save_file(tensors, temporary, metadata={"parts": json.dumps(self.parts), "sha256": _sha256(tensors)})
        flush_to_disk(temporary)
        os.replace(temporary, self.path)

    def _difference(self) -> str:
        """The parts that differ from the most similar file of the same data or model."""
        changes: list[list[str]] = []
        for path in Path(self.folder).glob("reference-*.safetensors"):
            content = _open(path)
            old = {} if content is None else content[0]
            if any(old.get(name) == self.parts[name] for name in ("data", "model")):
                changes.append([name for name in self.parts if old.get(name) != self.parts[name]])
        if not changes:
            return "no rows are cached for this model or data"
        return "changed since the last run: " + ", ".join(sorted(changes, key=lambda names: len(names))[0])


def reference_file(
    name_or_path: str,
    rows: Any,
    data: DataArguments,
    dtype: str,
    *,
    packed: bool,
    others: Mapping[str, str] | None = None,
) -> ReferenceFile:
    """The file of the start model `name_or_path` and the training rows of the cache. For one rank: it hashes the
    weights.

    others: further parts. Ranks and micro-batches change rounding alone, and are no part of the fingerprint.
    """
    import transformers

    parts = {
        "format": FORMAT,
        "data": rows.manifest["fingerprint"],
        "model": digest_files(model_files(name_or_path), data.cache.cache_dir),
        "dtype": dtype,
        "layout": "packed" if packed else "padded",
        "transformers": transformers.__version__,
    }
    return ReferenceFile(data.cache.cache_dir, {**parts, **(others or {})}, data.cache.rebuild_cache)


def _open(path: Path) -> tuple[dict[str, str], dict[str, RowLogprobs]] | None:
    """The parts and the splits; None if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if header["sha256"] != _sha256(tensors):
            return None
        splits = {name.rpartition(".")[0] for name in tensors}
        return json.loads(header["parts"]), {
            split: RowLogprobs(tensors[f"{split}.rows"], tensors[f"{split}.logprobs"]) for split in splits
        }
    except (OSError, KeyError, ValueError, TypeError, SafetensorError):
        return None


def _sha256(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


# PreferenceBatch -> float32 [B], the summed log-probability of each of its sequences; in eval mode, without gradients.
Reference = Callable[[PreferenceBatch], torch.Tensor]


class References(NamedTuple):
    """References of the training rows and of the evaluation rows."""

    train: Reference
    eval: Reference


def read_sequences(engine: TrainingEngine, batch: PreferenceBatch, ld_alpha: float = 1.0) -> torch.Tensor:
    """Return float32 [B], the log-probability of each response. ld_alpha: of `response_sums`."""
    rows = batch.ranked.rows
    return response_sums(engine(rows).logprobs_M, batch, ld_alpha)


def response_sums(logprobs_M: torch.Tensor, batch: PreferenceBatch, ld_alpha: float = 1.0) -> torch.Tensor:
    """Return [B], the log-probability of each response, summed over its tokens. ld_alpha: the weight of those beyond
    the length of its prompt's shortest response (Liu et al. 2024)."""
    rows = batch.ranked.rows
    if ld_alpha != 1.0:
        logprobs_M = torch.where(beyond_shortest(batch.ranked), ld_alpha * logprobs_M, logprobs_M)
    return sequence_sums(logprobs_M, rows.sequence_M, rows.end_B.numel())


def read_rows(
    run: TrainingRun[ResponsesRow],
    rows: Sequence[ResponsesRow],
    indices: Sequence[int],
    name: str,
    *,
    ld_alpha: float = 1.0,
) -> RowLogprobs:
    """Read the rows `indices` (ascending) with the model as it is. A collective; every rank gets all of them."""
    engine, plan, pad = run.engine, run.settings.eval_plan, run.settings.pad_token_id
    most = max((len(rows[index].response_ids) for index in indices), default=0)
    numbers = np.array(indices, dtype=np.int64)
    logprobs_RK = torch.zeros(len(indices), most, dtype=torch.float32, device=engine.ranks.device)
    engine.eval()
    with torch.no_grad(), progress_bar(len(indices), name, engine.ranks.is_main, unit="row") as bar:
        for laid_out in preference_batches(
            rows, indices, plan, engine.ranks, pad_token_id=pad, are_targets=True, media=run.settings.media
        ):
            batch = moved(laid_out, engine.ranks.device)
            places = (np.searchsorted(numbers, batch.row_B), batch.place_B)
            logprobs_RK[tuple(map(torch.from_numpy, places))] = read_sequences(engine, batch, ld_alpha)
            bar.update(min(plan.ranks * len(np.unique(batch.row_B)), bar.total - bar.n))  # ranks have about as many
    of_group_RK = logprobs_RK if engine.ranks.leads else torch.zeros_like(logprobs_RK)
    return RowLogprobs(numbers, summed(of_group_RK).cpu().numpy())


def taken_rows(rows: int, settings: LoopSettings) -> list[int]:
    """The rows that the run trains on, ascending: all of them unless the run is shorter than an epoch."""
    positions = min(settings.total_steps * settings.items_per_step, rows)
    return sorted(ShuffledStream(rows, settings.seed, settings.shuffle).take(0, positions))


def open_references(
    reference: str | None, run: TrainingRun[Any], flags: OneModelFlags, ld_alpha: float = 1.0, *, most_tokens: int = 0
) -> References:
    """The references of a run that has just been opened. reference: `--reference`; None for log-probabilities of 0.
    ld_alpha: of `response_sums`. most_tokens: above 0 for those of `mismatched` rows of at most so many tokens. A
    collective."""
    if reference is None:
        return References(no_reference, no_reference)
    if reference == "adapter_off":
        model: Any = run.engine.module.model
        return adapter_off_references(run.engine, model, ld_alpha)
    file, rows = None, run.train_rows
    if most_tokens:
        run = mismatched(run, most_tokens)
    # Drawn embeddings differ in each run: none would match.
    if run.ranks.is_main and not run.added_tokens:
        name, precision = flags.model.model_name_or_path, precision_of(flags.engine.dtype, flags.start)
        others = {} if ld_alpha == 1.0 else {"weight of tokens beyond the shortest response": str(ld_alpha)}
        if most_tokens:
            others["responses"] = f"of other rows, {most_tokens} tokens with the prompt"
        packed = run.settings.train_plan.packed
        file = reference_file(name, rows, flags.data, precision, packed=packed, others=others)
    return known_references(run, file, ld_alpha)


def no_reference(batch: PreferenceBatch) -> torch.Tensor:
    """Log-probabilities of 0, of losses without a reference."""
    return torch.zeros_like(batch.ranked.rows.end_B, dtype=torch.float32)


def precision_of(dtype: str, model: ModelSettings) -> str:
    """The precision of a reference's numbers: the dtype, and the format of its weights if that is less."""
    return f"{dtype} on weights in {model.weights_form}" if model.weights_form else dtype


def known_references(run: TrainingRun[ResponsesRow], file: ReferenceFile | None, ld_alpha: float = 1.0) -> References:
    """Log-probabilities of every row that the run will take: from `file`, or read now with the model as it is.

    file: on rank 0 alone; it also stores the new ones. ld_alpha: of `response_sums`. A collective.
    """
    started = time.monotonic()
    stored, reason = file.read() if file is not None else ({}, "")
    stored = from_main(stored)
    splits: dict[str, RowLogprobs] = {}
    rows_read = pairs_read = 0
    for split, rows, indices in (
        ("train", run.train_rows, taken_rows(len(run.train_rows), run.settings)),
        ("eval", run.eval_rows, list(range(len(run.eval_rows)))),
    ):
        splits[split] = stored.get(split, RowLogprobs.none())
        missing = splits[split].lacking(indices)
        if missing:
            new = read_rows(run, rows, missing, f"{run.settings.name}: reference of {split} rows", ld_alpha=ld_alpha)
            splits[split] = splits[split].joined(new)
        rows_read += len(missing)
        pairs_read += sum(math.comb(len(rows[index].response_ids), 2) for index in missing)
    if rows_read:
        seconds = time.monotonic() - started
        run.metrics.write(0, {"reference/pairs_per_second": pairs_read / seconds})
    if file is not None and rows_read:
        file.write(splits)
        why = "these rows were not cached" if stored else reason
        log(f"reference: computed {rows_read:,} rows in {seconds:.1f} s ({why}); {file.path}")
    elif file is not None:
        log(f"reference: {sum(len(known.rows_R) for known in splits.values()):,} rows read from the cache; {file.path}")

    def known(split: str) -> Reference:
        def read(batch: PreferenceBatch) -> torch.Tensor:
            logprobs_B = torch.tensor(splits[split].of(batch.row_B, batch.place_B))
            return moved(pinned(logprobs_B, run.ranks.device), run.ranks.device)

        return read

    return References(known("train"), known("eval"))


def adapter_off_references(engine: TrainingEngine, model: PreTrainedModel, ld_alpha: float = 1.0) -> References:
    """Read nothing before training. model: with adapters, inside `engine`. Raises ThreestepError if other weights
    train too: embeddings that have just gained tokens."""
    adapters = adapters_of(model)
    others = [name for name, part in model.named_parameters() if part.requires_grad and not adapters.holds(name)]
    if others:
        raise ThreestepError(
            f"--reference adapter_off needs a model in which only the adapters train, but {others[0]} also trains "
            "because tokens were added to the tokenizer; start from a model that has them, or use --reference cached"
        )

    def read(batch: PreferenceBatch) -> torch.Tensor:
        with adapters.off(model):
            return read_sequences(engine, batch, ld_alpha)

    return References(read, read)
