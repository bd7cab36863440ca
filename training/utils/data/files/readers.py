"""The table of readers: `jsonl:PATH`, `csv:PATH` and the like. Knows nothing of prompts, responses or formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.data.files.addresses import find_files, without_compression
from training.utils.data.files.arrow_rows import ArrowRows, read_arrow, read_csv, read_parquet
from training.utils.data.files.columns import Expected, JoinedRows, Kinds
from training.utils.data.files.json_rows import JsonLines, JsonList, read_json, read_jsonl

if TYPE_CHECKING:
    from training.utils.data.files.listing import PassedOver


class JoinedFiles(JoinedRows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[JsonLines | JsonList | ArrowRows]) -> None:
        super().__init__(parts)
        self.kinds: Kinds = {}
        self.nulls = sum((part.nulls for part in parts), Counter[str]())
        for part in parts:
            for column, kinds in part.kinds.items():
                self.kinds[column] = {**kinds, **self.kinds.get(column, {})}


Rows = JsonLines | JsonList | ArrowRows | JoinedFiles

READERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "jsonl": (read_jsonl, (".jsonl", ".ndjson", ".json")),
    "json": (read_json, (".json",)),
    "csv": (read_csv, (".csv", ".tsv")),
    "parquet": (read_parquet, (".parquet", ".pq")),
    "arrow": (read_arrow, (".arrow", ".feather", ".ipc")),
}


HUB = "hub"  # not a reader of files: `hub_rows`


def split_reader(name: str) -> tuple[str, str] | None:
    """The reader and the address of `jsonl:PATH`, `hub:OWNER/NAME` and the like, of a file's name alone, such as
    `pairs.csv` or `rows.jsonl.gz`, and of a folder that `save_to_disk` wrote; None for any other name."""
    reader, colon, address = name.partition(":")
    if colon and reader in (*READERS, HUB) and not address.startswith("//"):
        return reader, address
    bare = without_compression(name)
    # .json is also a suffix of JSON lines; the reader of JSON lists looks into the file
    by_suffix = (reader for reader in reversed(READERS) if bare.endswith(READERS[reader][1]))
    kind = next(by_suffix, "arrow" if is_saved_dataset(name) else None)
    return None if kind is None else (kind, name)


def is_saved_dataset(name: str) -> bool:
    """True for a folder that `save_to_disk` of a Dataset or a DatasetDict wrote."""
    marks = (("dataset_dict.json",), ("state.json", "dataset_info.json"))
    return any(all(os.path.isfile(os.path.join(name, file)) for file in files) for files in marks)


def files_of(reader: str, address: str, flag: str, passed: PassedOver | None = None) -> list[str]:
    """The files that a reader finds at an address (see `addresses.find_files`)."""
    return find_files(address, READERS[reader][1], flag, passed)


def open_rows(
    reader: str,
    files: Sequence[str],
    spool_dir: str | None,
    expected: Expected | None = None,
) -> Rows:
    """The rows of files, by the reader of that name."""
    read, _ = READERS[reader]
    parts = [read(path, expected, spool_dir) for path in files]
    return parts[0] if len(parts) == 1 else JoinedFiles(parts)
