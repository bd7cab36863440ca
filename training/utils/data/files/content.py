"""A file's bytes by its first ones, whatever its name: decompressed, as UTF-8, or refused by what they are."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from typing import Any

from training.utils.base.errors import ThreestepError

UTF_8 = "utf-8-sig"  # which reads text with and without a byte order mark
_START_BYTES = 512
_TAR_AT = 257
_UNPACK = "unpack it, and give the folder of its files as jsonl:FOLDER, or csv:, parquet:"
# What is no text, by its first bytes.
_KINDS = (
    (b"PAR1", "a Parquet file; give it as parquet:{}"),
    (b"ARROW1", "an Arrow file; give it as arrow:{}"),
    (b"\xff\xff\xff\xff", "an Arrow stream; give it as arrow:{}"),
    (b"PK\x03\x04", f"a zip archive or a spreadsheet; {_UNPACK}, or save the sheet as CSV UTF-8"),
    (b"\x80\x04\x95", "a pickle, which may run code when it is read; write the rows with to_parquet or to_json"),
    (b"SQLite format 3", "a database; write the rows with to_json or to_parquet"),
    (b"version https://git-lfs", "a pointer to a file in Git LFS, not the file; fetch it with git lfs pull"),
    (b"<!DOCTYPE html", "a web page, not the file; download the file itself"),
    (b"<!doctype html", "a web page, not the file; download the file itself"),
    (b"<html", "a web page, not the file; download the file itself"),
)


def unpacked(file: Any) -> io.BufferedReader:
    """The bytes of a file, decompressed if they begin as those of gzip, bzip2, xz or Zstandard do."""
    read = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
    start = start_of(read)
    if start.startswith(b"\x1f\x8b\x08"):
        return io.BufferedReader(gzip.GzipFile(fileobj=read))  # type: ignore[arg-type]
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return io.BufferedReader(bz2.BZ2File(read))  # type: ignore[arg-type]
    if start.startswith(b"\xfd7zXZ\0"):
        return io.BufferedReader(lzma.LZMAFile(read))  # type: ignore[arg-type]
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow  # fsspec needs another package for it

        return io.BufferedReader(pyarrow.input_stream(read, compression="zstd"))
    return read


def start_of(file: io.BufferedReader) -> bytes:
    """The next bytes of a file, which stay to be read."""
    return file.peek(_START_BYTES)[:_START_BYTES]


def encoding_of(start: bytes) -> str:
    """The encoding of a text by its byte order mark, or by the zeros beside its first letters."""
    encoding = json.detect_encoding(start[:4])
    return UTF_8 if encoding == "utf-8" else encoding


def check_text(start: bytes, path: str) -> None:
    """Raise ThreestepError for the first bytes of a file that holds no text."""
    kind = next((kind for begin, kind in _KINDS if start.startswith(begin)), None)
    if start[_TAR_AT:].startswith(b"ustar"):
        kind = f"a tar archive; {_UNPACK}"
    if kind is not None:
        raise ThreestepError(f"{path}: expected text, got {kind.format(path)}")
