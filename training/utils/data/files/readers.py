"""The rows behind `jsonl:PATH`, `csv:PATH`, `hub:OWNER/NAME` and the like, wherever they are stored. Files and folders
that no reader takes are refused in a sentence on what they are and what to give. Knows nothing of formats."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from training.utils.base.user_files import named_object
from training.utils.data.files.arrow_rows import ArrowRows, read_arrow, read_csv, read_parquet
from training.utils.data.files.columns import Expected, JoinedRows, Kinds
from training.utils.data.files.content import content_of_files, without_compression
from training.utils.data.files.json_rows import JsonLines, JsonList, read_json, read_jsonl
from training.utils.data.files.listing import PassedOver, check_address, find_files, folder_of, list_folder
from training.utils.plugins.registry import added


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


_EVALUATION_PART = re.compile(r"(test|validation|valid|val|eval|dev)([-_.]|$)")
_TRAINING_PART = re.compile(r"train([-_.]|$)")

STORES: dict[str, str] = added("row_stores", READERS)  # addresses of plugins' classes


def split_reader(name: str) -> tuple[str, str] | None:
    """The reader, or the plugin's store, and the address of `jsonl:PATH` and the like, of a file's name alone, such as
    `pairs.csv` or `rows.jsonl.gz`, and of a folder that `save_to_disk` wrote; None for any other name."""
    reader, colon, address = name.partition(":")
    if colon and reader in (*READERS, *STORES) and not address.startswith("//"):
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
    """The files that a reader finds at an address (see `listing.find_files`)."""
    return find_files(address, READERS[reader][1], flag, passed)


def open_rows(reader: str, files: Sequence[str], spool_dir: str | None, expected: Expected | None = None) -> Rows:
    """The rows of files, by the reader of that name."""
    read, _ = READERS[reader]
    parts = [read(path, expected, spool_dir) for path in files]
    return parts[0] if len(parts) == 1 else JoinedFiles(parts)


def share_files(files: Sequence[str]) -> tuple[list[str], list[str]]:
    """The (training, evaluation) files of a folder, by the parts in which their paths differ.

    Evaluation: by `names_evaluation`, if others are named for training; otherwise all are training.
    """
    parts = [name.split("/") for name in files]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))
    parts = [path[shared:] for path in parts]
    for_training = [any(map(names_training, path)) for path in parts]
    if not any(for_training):
        return list(files), []
    shares: tuple[list[str], list[str]] = [], []
    for name, trains, path in zip(files, for_training, parts, strict=True):
        shares[not trains and any(map(names_evaluation, path))].append(name)
    return shares


def names_training(name: str) -> bool:
    """True if a file, folder or split is named for training: `train`, `train-00000-of-00002`, ..."""
    return _TRAINING_PART.match(name) is not None


def names_evaluation(name: str) -> bool:
    """True if a file, folder or split is named for evaluation: `test`, `validation.jsonl`, ..."""
    return _EVALUATION_PART.match(name) is not None


class RowStore(Protocol):
    """A plugin's training rows, and evaluation rows where there are any; the constructor takes an address and the flag
    that gave it.

    address: for errors.
    folder: that relative paths in the rows begin at; None of rows that are not stored here.
    notes: sentences on what is passed over.
    """

    address: str
    folder: str | None
    notes: Sequence[str]

    @classmethod
    def check(cls, address: str, flag: str, *, reach: bool = False) -> None:
        """Raise ThreestepError if an address cannot be right, and with `reach` if its rows are out of reach."""

    def fingerprint(self) -> str:
        """A string that changes whenever a row may change."""

    def open(self, expected: Expected | None = None) -> tuple[Rows, Rows | None]:
        """The training rows and the evaluation rows; ThreestepError where one is not as `expected`."""


class StoredFiles:
    """The same of files here or behind addresses such as s3://, which the constructor lists."""

    def __init__(self, reader: str, address: str, flag: str, *, spool_dir: str | None, hold_out: bool) -> None:
        self.address = address
        self.folder = folder_of(address)
        self._reader = reader
        self._spool_dir = spool_dir
        passed = PassedOver()
        files = files_of(reader, address, flag, passed)
        self.notes = passed.sentences
        self._shares = share_files(files) if hold_out else (files, [])

    def fingerprint(self) -> str:
        return " ".join(content_of_files(files, self._spool_dir) for files in self._shares)

    def open(self, expected: Expected | None = None) -> tuple[Rows, Rows | None]:
        train, held_out = self._shares
        opened = open_rows(self._reader, train, self._spool_dir, expected)
        return opened, open_rows(self._reader, held_out, self._spool_dir, expected) if held_out else None


def stored_rows(name: str, flag: str, spool_dir: str | None, hold_out: bool = True) -> RowStore | StoredFiles | None:
    """The rows at the address `name`; None if it names no reader.

    flag: gave the name, for errors. spool_dir: for copies of files that have no random access. hold_out: files named
    for evaluation are no training rows.
    """
    split = split_reader(name)
    if split is None:
        return None
    reader, address = split
    if reader in STORES:
        return named_object(STORES[reader])(address, flag)  # type: ignore[no-any-return]
    return StoredFiles(reader, address, flag, spool_dir=spool_dir, hold_out=hold_out)


def check_stored(reader: str, address: str, flag: str, *, reach: bool = False) -> None:
    """Raise ThreestepError if an address cannot be right; uses no network. reach: asks a plugin's store, too."""
    if reader in STORES:
        named_object(STORES[reader]).check(address, flag, reach=reach)
    else:
        check_address(address, flag)


_WORKBOOK = "is a spreadsheet; save the sheet as CSV UTF-8, and pass that file"
_PICKLE = "is a pickle, which may run code when it is read; write the rows with to_parquet or to_json"
_KINDS = {
    ".xlsx": _WORKBOOK, ".xls": _WORKBOOK, ".ods": _WORKBOOK, ".numbers": _WORKBOOK,
    ".pkl": _PICKLE, ".pickle": _PICKLE, ".pt": _PICKLE,
    ".zip": "is an archive; unpack it, and pass its folder as jsonl:FOLDER, csv:FOLDER or parquet:FOLDER",
    ".tar": "is an archive; unpack it, and pass its folder as jsonl:FOLDER, csv:FOLDER or parquet:FOLDER",
    ".txt": "is text in an unknown format; pass it as csv:PATH if it has a header line, or as jsonl:PATH if it has one "
    'JSON object per line; for plain text, write one {"text": "..."} per line',
    ".md": 'is plain text; write one {"text": "..."} per line into a .jsonl file',
    ".yaml": "is YAML; write the rows as JSON Lines",
    ".yml": "is YAML; write the rows as JSON Lines",
    ".py": "is Python code; pass it as --dataset_module, and the name that it registers as --data_path",
    ".db": "is a database; write the rows with to_json or to_parquet",
    ".sqlite": "is a database; write the rows with to_json or to_parquet",
}  # fmt: skip
_MODEL = ("config.json", "adapter_config.json")


def why_no_dataset(name: str) -> str | None:
    """A sentence on a path that is there, or has the form of a file's name, and is no data; None for other names."""
    if os.path.isdir(name):
        return _of_folder(name)
    suffix = os.path.splitext(without_compression(name))[1].lower()
    if suffix in _KINDS:
        return f"'{name}' {_KINDS[suffix]}"
    if os.path.isfile(name):
        return f"'{name}' has no known extension; pass it as {_forms(name)}"
    if name.startswith(("/", ".", "~")):
        return f"'{name}' does not exist; the current folder is '{os.getcwd()}'"
    return None


def _of_folder(folder: str) -> str:
    if any(os.path.isfile(os.path.join(folder, file)) for file in _MODEL):
        return f"the folder '{folder}' holds a model, not data; pass it as --model_name_or_path"
    endings: Counter[str] = Counter()
    for path in list_folder(folder, lambda path: True, PassedOver()):
        endings[os.path.splitext(without_compression(path))[1].lower()] += 1
    if not endings:
        return f"the folder '{folder}' is empty; pass a folder or a file with rows, as in jsonl:PATH"
    held = ", ".join(f"{count:,} {ending or 'without an ending'}" for ending, count in endings.most_common(5))
    readers = [name for name, (_, suffixes) in reversed(READERS.items()) if {*suffixes} & endings.keys()]
    wanted = [name for name in readers if name != "jsonl" or {".jsonl", ".ndjson"} & endings.keys()]
    give = (
        f"it holds files ({held}); pass it as {' or '.join(f'{name}:{folder}' for name in wanted)}"
        if wanted
        else f"it holds no readable file ({held}); pass a folder of data files as {_forms('PATH')}"
    )
    return f"the folder '{folder}' needs a format prefix; {give}"


def _forms(path: str) -> str:
    return ", ".join(f"{reader}:{path}" for reader in READERS)
