"""The bytes of a local or remote file: decompressed, as UTF-8, mapped into memory or hashed; refused where the first
ones are those of another kind of file. Cheap to import: fsspec is imported only where it is needed."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from training.utils.base.credentials import redacted, redacted_value
from training.utils.base.errors import ThreestepError
from training.utils.data.files.digests import digest_file, hash_text

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
UTF_8 = "utf-8-sig"  # which reads text with and without a byte order mark
START_BYTES = 512
_TAR_AT = 257
_UNPACK = "unpack it, and pass its folder as jsonl:FOLDER, csv:FOLDER or parquet:FOLDER"
PARQUET, ARROW = "a Parquet file", "an Arrow file or stream"
# First bytes, what they begin, and what to do; {} for the path.
_KINDS = (
    (b"PAR1", PARQUET, "pass it as parquet:{}"),
    (b"ARROW1", ARROW, "pass it as arrow:{}"),
    (b"\xff\xff\xff\xff", ARROW, "pass it as arrow:{}"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", f"{_UNPACK}; save a spreadsheet as CSV UTF-8"),
    (b"\x80\x04\x95", "a pickle", "write the rows with to_parquet or to_json"),
    (b"SQLite format 3", "a database", "write the rows with to_parquet or to_json"),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file with git lfs pull"),
    (b"<!DOCTYPE html", "a web page", "download the file itself"),
    (b"<!doctype html", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)
_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\{\s*\"|\[\s*\{)")
_OF_PYTHON = re.compile(r"\s*[\[{(]+\s*'")  # as pandas and `datasets` write lists and objects into CSV


def is_remote(address: str) -> bool:
    return "://" in address


def without_compression(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return next((name.removesuffix(suffix) for suffix in COMPRESSED if name.endswith(suffix)), name)


@contextmanager
def open_stream(name: str) -> Iterator[io.BufferedReader]:
    """A file's bytes from the beginning, decompressed if they are those of a compressed file, whatever its name."""
    with reading(name):
        if not is_remote(name):
            with open(name, "rb") as plain:
                yield unpacked(plain)
        else:
            import fsspec

            with fsspec.open(name, "rb", compression=None) as file:
                yield unpacked(file)


def open_local(name: str, spool_dir: str | None, *, text: bool = False) -> BinaryIO:
    """A file that can be mapped into memory: itself, or where it is remote, compressed or a text in another encoding
    than UTF-8 an unnamed copy below `spool_dir` (None: the system's temporary folder) that vanishes when closed."""
    with open_stream(name) as file:
        encoding = encoding_of(start_of(file)) if text else UTF_8
        if not is_remote(name) and isinstance(file.raw, io.FileIO) and encoding == UTF_8:
            return open(name, "rb")
        copy = spool_file(spool_dir)
        source = file if encoding == UTF_8 else codecs.EncodedFile(file, "utf-8", encoding)
        shutil.copyfileobj(source, copy, 2**20)
    copy.flush()
    copy.seek(0)
    return copy


def spool_file(spool_dir: str | None) -> BinaryIO:
    """An empty unnamed file, which vanishes when it is closed or the process is killed."""
    if spool_dir is not None:
        os.makedirs(spool_dir, exist_ok=True)
    return cast(BinaryIO, tempfile.TemporaryFile(dir=spool_dir))


def mapped(file: BinaryIO) -> mmap.mmap | bytes:
    """A file's content, read where it is looked at; the mapping outlives the file object."""
    file.seek(0, io.SEEK_END)
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b""


def content_of_files(files: Sequence[str], memo_dir: str | None) -> str:
    """A hash of local files' bytes, and of what stores report of remote ones (size, time, ETag): nothing is fetched."""
    return hash_text(" ".join(_content_of_file(name, memo_dir) for name in files))


def _content_of_file(name: str, memo_dir: str | None) -> str:
    if not is_remote(name):
        return digest_file(name, memo_dir)
    with reading(name):
        import fsspec

        files, path = fsspec.core.url_to_fs(name)
        if redacted(name) == name:
            return f"{name} {files.checksum(path)}"
        # A new signature of the same file is no change, nor is another user. What a store reports may hold the address.
        return f"{redacted(name)} {json.dumps(redacted_value(files.info(path)), sort_keys=True, default=str)}"


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn the dozen unrelated exceptions of file systems and decompressors into one sentence."""
    try:
        yield
    except ThreestepError:
        raise
    except UnicodeDecodeError as error:
        if error.encoding == "utf-8":
            raise
        raise ThreestepError(
            f"'{name}' looks like {error.encoding} but cannot be decoded: {error.reason}; save it as UTF-8"
        ) from error
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        remedy = "install the package it names" if isinstance(error, ImportError) else "check the address"
        raise ThreestepError(f"'{name}' could not be read: {type(error).__name__}: {first_line}; {remedy}") from error


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
        kind, remedy = "JSON", "pass it as jsonl:{}"
    if kind not in (None, expected):
        raise ThreestepError(f"{path}: expected {expected}, got {kind}; {remedy.format(path)}")


def python_hint(text: str) -> str:
    """The end of a sentence on text that is not JSON: a remedy where it is Python's form of a list or an object."""
    return "; it looks like Python, so write it with json.dumps" if _OF_PYTHON.match(text) else ""
