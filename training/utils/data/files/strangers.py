"""Files and folders that are given as data and that no reader takes: sentences on what they are and what to give."""

from __future__ import annotations

import os
from collections import Counter

from training.utils.data.files.addresses import without_compression
from training.utils.data.files.listing import PassedOver, list_folder
from training.utils.data.files.readers import READERS

_WORKBOOK = "is a spreadsheet; save the sheet as CSV UTF-8, and give that file"
_PICKLE = "is a pickle, which may run code when it is read; write the rows with to_parquet or to_json"
_KINDS = {
    ".xlsx": _WORKBOOK, ".xls": _WORKBOOK, ".ods": _WORKBOOK, ".numbers": _WORKBOOK,
    ".pkl": _PICKLE, ".pickle": _PICKLE, ".pt": _PICKLE,
    ".zip": "is an archive; unpack it, and give the folder as jsonl:FOLDER, or csv:, parquet:",
    ".tar": "is an archive; unpack it, and give the folder as jsonl:FOLDER, or csv:, parquet:",
    ".txt": "is text without a form; with a first line of columns' names give it as csv:PATH, with one JSON object a "
    'line as jsonl:PATH; of plain text write {"text": "..."} a line',
    ".md": 'is plain text; write {"text": "..."} a line into a .jsonl file',
    ".yaml": "is YAML; write the rows as JSON lines",
    ".yml": "is YAML; write the rows as JSON lines",
    ".py": "is Python code; give it as --dataset_module, and the name that it registers as --data_path",
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
        return f"'{name}' is a file whose name does not say what it holds; give it as {_forms(name)}"
    if name.startswith(("/", ".", "~")):
        return f"'{name}' does not exist; the folder read from is '{os.getcwd()}'"
    return None


def _of_folder(folder: str) -> str:
    if any(os.path.isfile(os.path.join(folder, file)) for file in _MODEL):
        return f"the folder '{folder}' holds a model, no data; give it as --model_name_or_path, and data here"
    endings: Counter[str] = Counter()
    for path in list_folder(folder, lambda path: True, PassedOver()):
        endings[os.path.splitext(without_compression(path))[1].lower()] += 1
    if not endings:
        return f"the folder '{folder}' is empty; give a folder or a file with rows, as in jsonl:PATH"
    held = ", ".join(f"{count:,} {ending or 'without an ending'}" for ending, count in endings.most_common(5))
    readers = [name for name, (_, suffixes) in reversed(READERS.items()) if {*suffixes} & endings.keys()]
    wanted = [name for name in readers if name != "jsonl" or {".jsonl", ".ndjson"} & endings.keys()]
    give = (
        f"give it as {' or '.join(f'{name}:{folder}' for name in wanted)}"
        if wanted
        else (f"and no file that a reader takes; give a folder of such files as {_forms('PATH')}")
    )
    return f"the folder '{folder}' is no dataset by its name alone; it holds files: {held}; {give}"


def _forms(path: str) -> str:
    return ", ".join(f"{reader}:{path}" for reader in READERS)
