"""The file of the reference's log-probabilities, named by a fingerprint of the inputs that they depend on.

One safetensors file next to the tokenized data, named by the fingerprint of its parts (`reference_file`), which its
header holds in clear; published by one rename. Knows no engine.

R rows, K responses of a row, B sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.storage import flush_to_disk
from training.utils.data.files.digests import digest_files, hash_parts
from training.utils.loading.configurations import model_files

if TYPE_CHECKING:
    from training.utils.data.build.arguments import DataArguments

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
            return {}, "rebuild_cache was asked for"
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
            return "none was read before with this model or data"
        return "changed since the last one: " + ", ".join(sorted(changes, key=lambda names: len(names))[0])


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
