"""Sixty forms of data, each a tiny file or folder, with how each is read or why it is refused, for a page.

The page is docs/reference/formats.md.

python -m tests.support.form_table

Each holds a question `Hi` with the answer `Ho`, in other rows or columns too. A form that is read teaches `Ho`.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.data_flags import data_flags
from tests.support.data_forms import lines_of
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.file_dataset import create_raw_dataset

_MOST_CHARACTERS = 230  # of a sentence in the table


@dataclass(frozen=True)
class DataForm:
    """name: for the table. write: makes the file or folder at a path. address: of --data_path, {} for the path."""

    name: str
    file: str
    write: Callable[[Path], Any]
    address: str = "{}"
    flags: dict[str, Any] = field(default_factory=dict)
    phase: int = 1


def _bytes(content: str | bytes, encoding: str = "utf-8") -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))


def _rows(*rows: dict[str, Any]) -> Callable[[Path], Any]:
    return _bytes("".join(json.dumps(row) + "\n" for row in rows))


def _table(kind: str, **columns: list[Any]) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import pyarrow
        from pyarrow import feather, parquet

        table = pyarrow.table(columns)
        if kind == "stream":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
        else:
            {"parquet": parquet.write_table, "feather": feather.write_feather}[kind](table, str(path))

    return write


def _saved(*splits: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import datasets

        rows = datasets.Dataset.from_list([QA])
        datasets.disable_progress_bars()
        whole = datasets.DatasetDict(dict.fromkeys(splits, rows)) if splits else rows
        whole.save_to_disk(str(path))

    return write


def _folder(**files: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("_", ".")).write_text(content, encoding="utf-8")

    return write


def _hidden(rows: str, stale: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        for name in (".git", ".ipynb_checkpoints", "__MACOSX"):
            (path / name).mkdir(parents=True)
            (path / name / "rows.jsonl").write_text(stale, encoding="utf-8")
        (path / "rows.jsonl").write_text(rows, encoding="utf-8")

    return write


QA = {"question": "Hi", "answer": "Ho"}
PAIR = {"prompt": "Hi", "chosen": "Ho", "rejected": "No"}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
CSV, LINE = "question,answer\nHi,Ho\n", json.dumps(QA) + "\n"

FORMS = [
    DataForm("JSON lines", "rows.jsonl", _rows(QA)),
    DataForm("JSON lines, named .ndjson", "rows.ndjson", _rows(QA)),
    DataForm("JSON lines, named .json", "rows.json", _rows(QA, QA)),
    DataForm("JSON lines with blank lines between", "rows.jsonl", _bytes(f"\n{LINE}\n\n{LINE}")),
    DataForm("JSON lines with a byte-order mark", "rows.jsonl", _bytes(LINE, "utf-8-sig")),
    DataForm("JSON lines in UTF-16", "rows.jsonl", _bytes(LINE, "utf-16")),
    DataForm("JSON lines, gzip", "rows.jsonl.gz", _bytes(gzip.compress(LINE.encode()))),
    DataForm("JSON lines, gzip, named .jsonl", "rows.jsonl", _bytes(gzip.compress(LINE.encode()))),
    DataForm("JSON lines separated by CR", "rows.jsonl", _bytes(2 * LINE.replace("\n", "\r"))),
    DataForm("JSON lines that end in a comma", "rows.jsonl", _bytes(LINE.replace("\n", ",\n"))),
    DataForm("JSON objects that span several lines", "rows.jsonl", _bytes(2 * json.dumps(QA, indent=2))),
    DataForm("a Git LFS pointer", "rows.jsonl", _bytes("version https://git-lfs.github.com/spec/v1\noid 1\n")),
    DataForm("a JSON list", "rows.json", _bytes(json.dumps([QA]))),
    DataForm("a JSON list, named .jsonl", "rows.jsonl", _bytes(json.dumps([QA]))),
    DataForm("a JSON object with one list", "rows.json", _bytes(json.dumps({"version": 1, "data": [QA]}))),
    DataForm("a single JSON object", "rows.json", _bytes(json.dumps(QA))),
    DataForm("pandas' to_json without arguments", "rows.json", _bytes('{"question":{"0":"Hi"},"answer":{"0":"Ho"}}')),
    DataForm("a JSON object with one list per column", "rows.json", _bytes('{"question":["Hi"],"answer":["Ho"]}')),
    DataForm("a JSON list of strings", "rows.json", _bytes('["Hi", "Ho"]')),
    DataForm("Parquet, named .jsonl", "rows.jsonl", _table("parquet", question=["Hi"], answer=["Ho"])),
    DataForm("JSON lines, named .csv", "rows.csv", _bytes(LINE)),
    DataForm("truncated JSON", "rows.jsonl", _bytes(LINE + '{"question": "Hi"\n')),
    DataForm("CSV", "rows.csv", _bytes(CSV)),
    DataForm("CSV with semicolons", "rows.csv", _bytes("question;answer\nHi;Ho\n")),
    DataForm("CSV with semicolons, with commas in values", "rows.csv", _bytes('question;answer;n\nHi;Ho;1,5\n')),
    DataForm("CSV with tabs", "rows.csv", _bytes("question\tanswer\nHi\tHo\n")),
    DataForm("CSV with vertical bars", "rows.csv", _bytes("question|answer\nHi|Ho\n")),
    DataForm("CSV with Excel's sep=; line", "rows.csv", _bytes("sep=;\r\nquestion;answer\r\nHi;Ho\r\n")),
    DataForm("TSV", "rows.tsv", _bytes("question\tanswer\nHi\tHo\n")),
    DataForm("CSV with a byte-order mark (CSV UTF-8)", "rows.csv", _bytes(CSV, "utf-8-sig")),
    DataForm("CSV in UTF-16 (Excel's Unicode text)", "rows.csv", _bytes("question\tanswer\r\nHi\tHo\r\n", "utf-16")),
    DataForm("CSV in Latin-1", "rows.csv", _bytes("question,answer\nHi,Hé\n", "latin-1")),
    DataForm("CSV with every value in quotes", "rows.csv", _bytes('"question","answer"\n"Hi","Ho"\n')),
    DataForm("CSV with pandas' index (Unnamed: 0)", "rows.csv", _bytes("Unnamed: 0,question,answer\n0,Hi,Ho\n")),
    DataForm("CSV with an unnamed index", "rows.csv", _bytes(",question,answer\n0,Hi,Ho\n")),
    DataForm("CSV with Windows line endings", "rows.csv", _bytes(CSV.replace("\n", "\r\n"))),
    DataForm("CSV, bzip2", "rows.csv.bz2", _bytes(bz2.compress(CSV.encode()))),
    DataForm("CSV, xz", "rows.csv.xz", _bytes(lzma.compress(CSV.encode()))),
    DataForm("CSV with two columns of the same name", "rows.csv", _bytes("question,answer,answer\nHi,Ho,Ha\n")),
    DataForm("CSV with an extra value", "rows.csv", _bytes(CSV + "Hi,Ho,Ha\n")),
    DataForm("CSV without a header line", "rows.csv", _bytes("Hi,Ho\nHi,Ho\n")),
    DataForm("Parquet", "rows.parquet", _table("parquet", question=["Hi"], answer=["Ho"])),
    DataForm("Parquet, named .pq", "rows.pq", _table("parquet", question=["Hi"], answer=["Ho"])),
    DataForm("Parquet with pandas' index", "rows.parquet",
             _table("parquet", question=["Hi"], answer=["Ho"], __index_level_0__=[0])),
    DataForm("an Arrow file (Feather)", "rows.feather", _table("feather", question=["Hi"], answer=["Ho"])),
    DataForm("an Arrow stream", "rows.arrow", _table("stream", question=["Hi"], answer=["Ho"])),
    DataForm("a save_to_disk folder of a Dataset", "saved", _saved()),
    DataForm("a save_to_disk folder of a DatasetDict", "saved", _saved("train", "test")),
    DataForm("a folder of JSON lines, with jsonl:", "rows", _folder(train_jsonl=LINE, test_jsonl=LINE), "jsonl:{}"),
    DataForm("the same folder, without a prefix", "rows", _folder(train_jsonl=LINE, test_jsonl=LINE, notes_md="-")),
    DataForm("a folder that contains hidden folders", "rows", _hidden(LINE, LINE.replace("Ho", "No")), "jsonl:{}"),
    DataForm("an empty folder", "rows", _folder()),
    DataForm("capitalized column names", "rows.csv", _bytes("Question,Answer\nHi,Ho\n")),
    DataForm("column names with spaces around them", "rows.csv", _bytes("question , answer\nHi,Ho\n")),
    DataForm("a misspelled column name", "rows.csv", _bytes("questoin,answer\nHi,Ho\n")),
    DataForm("a flag that names a missing column", "rows.csv", _bytes(CSV),
             flags={"prompt_column": "Question", "chosen_column": "answer"}),
    DataForm("an answer that is a whole number", "rows.jsonl", _rows({**QA, "answer": 4}, QA)),
    DataForm("an answer that is 4.0", "rows.jsonl", _rows({**QA, "answer": 4.0})),
    DataForm("an answer that is true or false", "rows.jsonl", _rows({**QA, "answer": True})),
    DataForm("a numeric answer next to choices", "rows.jsonl", _rows({**QA, "choices": ["Ha", "Ho"], "answer": 1})),
    DataForm("an empty file", "rows.jsonl", _bytes("")),
    DataForm("a CSV with only a header line", "rows.csv", _bytes("question,answer\n")),
    DataForm("an Excel workbook", "rows.xlsx", _bytes(b"PK\x03\x04")),
    DataForm("a pickle", "rows.pkl", _bytes(b"\x80\x04")),
    DataForm("a zip archive", "rows.zip", _bytes(b"PK\x03\x04")),
    DataForm("plain text", "rows.txt", _bytes("Hi\nHo\n")),
    DataForm("a file without an extension", "rows", _rows(QA)),
    DataForm("the same file, with jsonl:", "rows", _rows(QA), "jsonl:{}"),
    DataForm("pairs", "pairs.jsonl", _rows(PAIR)),
    DataForm("messages", "chats.jsonl", _rows({"messages": CHAT})),
    DataForm("messages as JSON text, in CSV", "chats.csv",
             _bytes('messages\n"' + json.dumps(CHAT).replace('"', '""') + '"\n')),
    DataForm("rows without responses", "rows.jsonl", _rows({"prompt": "Hi"})),
]  # fmt: skip


def outcome(form: DataForm, tokenizer: Any) -> tuple[str, list[str]]:
    """What the table says of a form, and what its phase gets of it (`lines_of`). In an empty folder."""
    form.write(Path(form.file))
    name = form.address.format(form.file)
    lines = lines_of(form.phase, name, tokenizer, "cache", **form.flags)
    if lines and lines[0].startswith("! "):
        sentence = lines[0].removeprefix("! ").replace(os.getcwd(), "/here")
        cut = sentence if len(sentence) <= _MOST_CHARACTERS else f"{sentence[:_MOST_CHARACTERS].rstrip()} ..."
        return f"refused: {cut}", lines
    source = data_flags(data_path=[name], **form.flags).source
    with contextlib.suppress(ThreestepError):
        return create_raw_dataset(name, source, "cache", 1).get_recognition().format, lines
    return "read", lines


def outcomes() -> dict[str, tuple[str, list[str]]]:
    tokenizer = train_tokenizer(SENTENCES)
    found: dict[str, tuple[str, list[str]]] = {}
    before = os.getcwd()
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                found[form.name] = outcome(form, tokenizer)
            finally:
                os.chdir(before)
    return found


def as_markdown(found: dict[str, tuple[str, list[str]]]) -> str:
    rows = [f"| {_plain(name)} | {_plain(text)} |" for name, (text, _) in found.items()]
    return "\n".join(["| data | read as |", "| --- | --- |", *rows, ""])


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(as_markdown(outcomes()))
