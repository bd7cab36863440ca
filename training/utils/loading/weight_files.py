"""The safetensors of a model folder by their headers: the files, their tensors, and checks that they are whole.

Imports no library and reads no weight: a header is the size of a file's tensors, not of their values.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' limit
_GIT_LFS = b"version https://git-lfs"
# Bytes of one value, by safetensors' names; others are not checked.
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_WHOLE = {"F16", "BF16", "F32", "F64"}  # of weights that stand for themselves


@dataclass(frozen=True)
class StoredTensor:
    """dtype: safetensors' name of it, such as BF16. file: where it is."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_whole(self) -> bool:
        """True if its values are numbers as a model computes with them; otherwise integers, or floats of few bits,
        which need scales."""
        return self.dtype in _WHOLE


def weight_files(folder: Path, explicit: str | None = None) -> list[Path]:
    """Return the safetensors that transformers reads in `folder`; [] if there are none.

    explicit: `transformers_weights` of the configuration, a file's name

    Raises ThreestepError if an index is damaged or names files that are not there.
    """
    for name in (explicit,) if explicit else (ONE_FILE, INDEX):
        path = folder / name
        if path.is_file():
            return _shards(path) if name.endswith(".index.json") else [path]
    return []


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name. ThreestepError if it is cut off or damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if (first + file.read(len(_GIT_LFS) - 8)).startswith(_GIT_LFS):
            raise ThreestepError(
                f"'{path}': expected weights, got Git LFS's pointer to them; run `git lfs pull` in the folder"
            )
        length = int.from_bytes(first, "little")
        if size < 8 or (8 + length > size and length <= _LONGEST_HEADER_BYTES):
            raise _cut_off(path, 8 + length if len(first) == 8 else 8, size)
        if length > _LONGEST_HEADER_BYTES:
            raise _damaged(path, f"its header would have {length:,} bytes")
        file.seek(8)
        text = file.read(length)
    try:
        header = parse_json(text)
        tensors = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
        notes = dict(header.get("__metadata__") or {})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "its header is no table of tensors") from None
    if not all(isinstance(note, str) for note in notes.values()):
        raise _damaged(path, "the __metadata__ of its header holds more than texts")
    _check_places(path, tensors, size - 8 - length)
    return {name: StoredTensor(dtype, shape, path) for name, (dtype, shape, *_) in tensors.items()}


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = map(int, entry["data_offsets"])
    if not isinstance(entry["dtype"], str):
        raise TypeError(entry["dtype"])
    return entry["dtype"], tuple(int(side) for side in entry["shape"]), begin, end


def _check_places(path: Path, tensors: dict[str, Any], data_bytes: int) -> None:
    """Check that every tensor begins where the one before it ends, and that the last ends with the file."""
    at = 0
    for name, (dtype, shape, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        wanted = _BYTES[dtype] * prod(shape) if dtype in _BYTES else end - begin
        if begin != at or end - begin != wanted:
            raise _damaged(path, f"{name} ({dtype} {list(shape)}) is said to be at bytes {begin:,} to {end:,}")
        at = end
    if at > data_bytes:
        raise _cut_off(path, path.stat().st_size - data_bytes + at, path.stat().st_size)
    if at < data_bytes:
        raise _damaged(path, f"{data_bytes - at:,} bytes follow its last tensor")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(index, "it holds no weight_map from tensors to files") from None
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ThreestepError(
            f"'{index}' names {len(paths)} files of weights and {len(absent)} of them are not there, such as "
            f"{absent[0]}; download or copy the folder again"
        )
    return paths


def _cut_off(path: Path, wanted: int, size: int) -> ThreestepError:
    return ThreestepError(
        f"'{path}': expected at least {wanted:,} bytes by its header, got {size:,}: the file is cut off; download or "
        "copy it again"
    )


def _damaged(path: Path, why: str) -> ThreestepError:
    return ThreestepError(f"'{path}' is damaged: {why}; download or copy it again")
