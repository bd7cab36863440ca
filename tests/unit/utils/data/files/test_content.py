"""A file is read as what it holds, whatever its name; a hash follows content, and is remembered while it may be."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import time
import zipfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from training.utils.base.errors import ThreestepError
from training.utils.data.files import digests
from training.utils.data.files.digests import digest_file, hash_parts
from training.utils.data.files.readers import open_rows

ROW = {"question": "Hé?", "answer": "二"}
LINE = json.dumps(ROW, ensure_ascii=False) + "\n"


def zstd(content: bytes) -> bytes:
    """In two frames."""
    return b"".join(pyarrow.compress(half, codec="zstd", asbytes=True) for half in (content[:9], content[9:]))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd, bytes])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("reader", "content"),
    [
        ("jsonl", LINE),
        ("json", f"[{LINE}]"),
        ("csv", "question,answer\nHé?,二\n"),
        ("csv", "question,answer\rHé?,二\r"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_text_is_read_in_every_coat(tmp_path, pack, suffix, reader, content, encoding):
    path = tmp_path / f"rows.{reader}{suffix}"
    path.write_bytes(pack(content.encode(encoding)))
    assert list(open_rows(reader, [str(path)], str(tmp_path))) == [ROW]


@pytest.mark.parametrize("reader", ["parquet", "arrow"])
def test_tables_may_be_packed(tmp_path, reader):
    path, table = tmp_path / f"rows.{reader}", pyarrow.Table.from_pylist([ROW])
    if reader == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert list(open_rows(reader, [str(path)], str(tmp_path))) == [ROW]


def of_parquet() -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist([ROW]), made := io.BytesIO())
    return made.getvalue()


def of_stream() -> bytes:
    table = pyarrow.Table.from_pylist([ROW])
    with pyarrow.ipc.new_stream(made := io.BytesIO(), table.schema) as file:
        file.write_table(table)
    return made.getvalue()


def of_archive(kind: str) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("rows.jsonl", LINE)
    else:
        with tarfile.open(fileobj=made, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo("rows.jsonl"), io.BytesIO())
    return made.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("reader", "content", "sentence"),
    [
        ("jsonl", of_parquet(), "expected text, got a Parquet file; pass it as parquet:"),
        ("csv", of_parquet(), "expected CSV, got a Parquet file; pass it as parquet:"),
        ("json", of_stream(), "expected text, got an Arrow file or stream; pass it as arrow:"),
        ("jsonl", of_archive("zip"), "expected text, got a zip archive or a spreadsheet; unpack it"),
        ("jsonl", of_archive("tar"), "expected text, got a tar archive; unpack it"),
        ("jsonl", POINTER, "expected text, got a Git LFS pointer; fetch the file with git lfs pull"),
        ("parquet", POINTER, "expected a Parquet file, got a Git LFS pointer"),
        ("csv", POINTER, "expected CSV, got a Git LFS pointer"),
        ("jsonl", b"<!DOCTYPE html>\n<html>", "expected text, got a web page; download the file itself"),
        ("parquet", LINE.encode(), "expected a Parquet file, got JSON; pass it as jsonl:"),
        ("arrow", of_parquet(), "expected an Arrow file or stream, got a Parquet file; pass it as parquet:"),
        ("csv", f"[{LINE}]".encode(), "expected CSV, got JSON; pass it as jsonl:"),
        ("jsonl", b"{'question': 'Hi'}\n", "it looks like Python, so write it with json.dumps"),
        (
            "jsonl",
            LINE.encode("utf-16") + b"\x00\xd8a\x00",
            "looks like utf-16-le but cannot be decoded: illegal UTF-16",
        ),
    ],
    # An archive holds the time at which it is made, and ids of tests must be the same in every process.
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
def test_what_a_file_is_not(tmp_path, reader, content, sentence):
    path = Path(tmp_path) / f"rows.{reader}"
    path.write_bytes(content)
    with pytest.raises(ThreestepError) as caught:
        open_rows(reader, [str(path)], str(tmp_path))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_parts_in_any_order():
    assert hash_parts({"a": "1", "b": "2"}) == hash_parts({"b": "2", "a": "1"})
    assert hash_parts({"a": "1"}) != hash_parts({"a": "2"}) != hash_parts({"b": "2"})


@pytest.fixture
def large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_ALWAYS_HASHED_BYTES", 10)
    path = tmp_path / "large.txt"
    path.write_text("x" * 100)
    return path


def test_a_large_file_is_hashed_once_and_a_change_with_its_old_size_and_time_is_noticed(
    large_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)  # as if some time had passed since it changed
    first = digest_file(str(large_file), str(tmp_path))
    with monkeypatch.context() as unread:
        unread.setattr(digests, "sha256_of", None)
        assert digest_file(str(large_file), str(tmp_path)) == first
    times = large_file.stat()
    large_file.write_text("y" * 100)
    os.utime(large_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = digest_file(str(large_file), str(tmp_path))
    assert other != first
    for damaged in ("{", "[]", '{"a": 1}'):
        (tmp_path / "file_digests.json").write_text(damaged)
        assert digest_file(str(large_file), str(tmp_path)) == other


def test_what_changed_just_now_is_not_remembered(large_file, tmp_path):
    os.utime(large_file, (time.time(), time.time()))
    digest_file(str(large_file), str(tmp_path))
    assert not (tmp_path / "file_digests.json").exists()
