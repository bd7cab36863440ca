"""Encoded media in an Arrow file, each once, and back by memory map.

A row knows its media by their places in the file, their keys.
Knows bytes alone, not how they are decoded.

A file holds record batches of `MEDIA_PER_BATCH` media (the last may be shorter), so medium i is in batch
i // MEDIA_PER_BATCH.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import HashedFile
from training.utils.contracts.rows import STORED_MEDIA

MEDIA_PER_BATCH = 64
_SCHEMA = pa.schema([("sha256", pa.binary(32)), ("bytes", pa.large_binary())])


class GrowingStore(Protocol):
    """A store of the rows' media while the rows are made."""

    def add(self, digest: bytes, data: bytes) -> int:
        """The key of a medium: of equal bytes the same. digest: its sha256."""


class HeldMedia:
    """Media in memory."""

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}
        self._held: list[bytes] = []

    def add(self, digest: bytes, data: bytes) -> int:
        """See `GrowingStore`."""
        if digest not in self._keys:
            self._keys[digest] = len(self._held)
            self._held.append(data)
        return self._keys[digest]

    def __getitem__(self, key: int) -> bytes:
        return self._held[key]


class MediaWriter:
    """Writes media to a file as they are added. Without any there is no file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._keys: dict[bytes, int] = {}
        self._waiting: list[tuple[bytes, bytes]] = []
        self._file: HashedFile | None = None
        self._stream: Any = None

    def add(self, digest: bytes, data: bytes) -> int:
        """See `GrowingStore`."""
        if digest not in self._keys:
            self._keys[digest] = len(self._keys)
            self._waiting.append((digest, data))
            if len(self._waiting) == MEDIA_PER_BATCH:
                self._write()
        return self._keys[digest]

    def _write(self) -> None:
        if self._file is None:
            self._file = HashedFile(self._path)
            self._stream = pa.ipc.new_file(self._file, _SCHEMA)
        digests, data = zip(*self._waiting, strict=True)
        columns = [pa.array(digests, _SCHEMA.field(0).type), pa.array(data, _SCHEMA.field(1).type)]
        self._stream.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        self._waiting = []

    def finish(self) -> dict[str, Any] | None:
        """Write the rest of the file. Returns its entry in a manifest, None without media."""
        if self._waiting:
            self._write()
        if self._file is None:
            return None
        self._stream.close()
        self._file.close()
        file = self._file
        return {STORED_MEDIA: len(self._keys), "bytes": file.size_bytes, "sha256": file.sha256, "xxh3": file.xxh3}

    def close(self) -> None:
        """Close the file, as it is: without `finish` it has no footer."""
        if self._file is not None:
            self._file.close()


class MediaStore(Sequence):
    """The media of a file: `store[key]` is a medium's encoded bytes. Opening reads only the file's footer; a
    medium is compared with its sha256 when it is read. ThreestepError if it differs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = pa.ipc.open_file(pa.memory_map(path, "r"))
        batches = self._reader.num_record_batches
        last = self._reader.get_batch(batches - 1).num_rows if batches else 0
        self._count = max(batches - 1, 0) * MEDIA_PER_BATCH + last

    def __reduce__(self) -> tuple[Any, ...]:
        return (MediaStore, (self.path,))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Any) -> Any:
        data = self._cell("bytes", int(key)).as_buffer().to_pybytes()
        if hashlib.sha256(data).digest() != self.digest(int(key)):
            raise ThreestepError(
                f"{self.path}: image {key} has changed since it was written; run again with "
                "--rebuild_cache (and --resume)"
            )
        return data

    def digest(self, key: int) -> bytes:
        """A medium's sha256."""
        return self._cell("sha256", key).as_py()

    def _cell(self, column: str, key: int) -> Any:
        if not 0 <= key < self._count:
            raise IndexError(f"medium {key} of {self._count}")
        number, inside = divmod(key, MEDIA_PER_BATCH)
        return self._reader.get_batch(number).column(column)[inside]


def copy_media(path: str, keys: np.ndarray, writer: MediaWriter) -> np.ndarray:
    """Add the media of a file that rows have to another, and return their new keys by their old ones, int64.

    keys: that the rows have.
    """
    used = np.unique(keys)
    new_keys = np.zeros(int(used[-1]) + 1 if len(used) else 0, np.int64)
    store = MediaStore(path)
    for key in map(int, used):
        new_keys[key] = writer.add(store.digest(key), store[key])
    return new_keys
