"""A file's bytes by its first ones, whatever its name: decompressed, as UTF-8, or refused by what they are."""

from __future__ import annotations

import gzip
import io
import json
import re
from typing import Any

from training.utils.base.errors import ThreestepError

UTF_8 = "utf-8-sig"  # which reads text with and without a byte order mark
START_BYTES = 512
_TAR_AT = 257
_UNPACK = "unpack it, and give the folder of its files as jsonl:FOLDER, or csv:, parquet:"
PARQUET, ARROW = "a Parquet file", "an Arrow file or stream"
# First bytes, what they begin, and what to do; {} for the path.
_KINDS = (
    (b"PAR1", PARQUET, "give it as parquet:{}"),
    (b"ARROW1", ARROW, "give it as arrow:{}"),
    (b"\xff\xff\xff\xff", ARROW, "give it as arrow:{}"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", f"{_UNPACK}; save a sheet as CSV UTF-8"),
    (b"\x80\x04\x95", "a pickle", "write the rows with to_parquet or to_json"),
    (b"SQLite format 3", "a database", "write the rows with to_parquet or to_json"),
    (b"version https://git-lfs", "a pointer to a file in Git LFS", "fetch the file with git lfs pull"),
    (b"<!DOCTYPE html", "a web page", "download the file itself"),
    (b"<!doctype html", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)
_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\{\s*\"|\[\s*\{)")
_OF_PYTHON = re.compile(r"\s*[\[{(]+\s*'")  # as pandas and `datasets` write lists and objects into CSV


def unpacked(file: Any) -> io.BufferedReader:
    """The bytes of a file, decompressed if they begin as those of gzip, bzip2, xz or Zstandard do."""
    read = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
    start = start_of(read)
    if start.startswith(b"\x1f\x8b\x08"):
        return io.BufferedReader(gzip.GzipFile(fileobj=read))  # type: ignore[arg-type]
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        import bz2  # which a build of Python may lack, and lzma

        return io.BufferedReader(bz2.BZ2File(read))  # type: ignore[arg-type]
    if start.startswith(b"\xfd7zXZ\0"):
        import lzma

        return io.BufferedReader(lzma.LZMAFile(read))  # type: ignore[arg-type]
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow  # fsspec needs another package for it

        return io.BufferedReader(pyarrow.input_stream(read, compression="zstd"))
    return read


def start_of(file: io.BufferedReader) -> bytes:
    """The next bytes of a file, which stay to be read."""
    return file.peek(START_BYTES)[:START_BYTES]


def encoding_of(start: bytes) -> str:
    """The encoding of a text by its byte order mark, or by the zeros beside its first letters."""
    encoding = json.detect_encoding(start[:4])
    return UTF_8 if encoding == "utf-8" else encoding


def check_kind(start: bytes, path: str, expected: str) -> None:
    """Raise ThreestepError where the first bytes of a file are those of another kind than the expected one."""
    kind, remedy = next((each for begin, *each in _KINDS if start.startswith(begin)), (None, ""))
    if start[_TAR_AT:].startswith(b"ustar"):
        kind, remedy = "a tar archive", _UNPACK
    if expected != "text" and _JSON.match(start):
        kind, remedy = "JSON", "give it as jsonl:{}"
    if kind not in (None, expected):
        raise ThreestepError(f"{path}: expected {expected}, got {kind}; {remedy.format(path)}")


def python_hint(text: str) -> str:
    """The end of a sentence on text that is not JSON: a remedy where it is Python's form of a list or an object."""
    return "; it is Python's form, write it with json.dumps" if _OF_PYTHON.match(text) else ""
