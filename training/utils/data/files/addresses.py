"""Addresses of files: local paths, globs, folders of shards and fsspec addresses (`s3://`, `memory://`, ...).

Knows nothing of their content. Cheap to import: fsspec is imported only where it is needed.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, cast

from training.utils.base.credentials import redacted, redacted_value
from training.utils.base.errors import ThreestepError
from training.utils.data.files.content import UTF_8, encoding_of, start_of, unpacked
from training.utils.data.files.digests import digest_file, hash_text
from training.utils.data.files.listing import (
    PassedOver,
    check_versions,
    each_once,
    holds_rows,
    list_folder,
    list_pattern,
    without_hidden,
)

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_EVALUATION_PART = re.compile(r"(test|validation|valid|val|eval|dev)([-_.]|$)")
_TRAINING_PART = re.compile(r"train([-_.]|$)")


def is_remote(address: str) -> bool:
    return "://" in address


def check_address(address: str, flag: str) -> None:
    """Raise ThreestepError where a local address names nothing; remote ones are not checked."""
    if not is_remote(address):
        _local_matches(address, flag, PassedOver())


def find_files(address: str, suffixes: Sequence[str], flag: str, passed: PassedOver | None = None) -> list[str]:
    """The files of an address, sorted: itself, the matches of a glob, or the files in and below a folder that end in
    one of `suffixes` (or in one of them and .gz, .bz2, .xz, .zst).

    flag: gave the address, for errors. passed: gets the names of files that are not listed.
    """
    passed = PassedOver() if passed is None else passed
    endings = tuple(suffix + more for suffix in suffixes for more in ("", *_COMPRESSED))
    if is_remote(address):
        return _find_remote(address, endings, flag, passed)
    matches = _local_matches(address, flag, passed)
    if len(matches) == 1 and os.path.isdir(matches[0]):
        check_versions(matches[0], flag)
        found = list_folder(matches[0], lambda name: name.endswith(endings), passed)
        _check_found(found, endings, address, flag=flag, passed=passed)
        return found
    if len(matches) == 1:
        return matches
    return each_once(matches, folder_of(address) or ".", passed)


def _local_matches(address: str, flag: str, passed: PassedOver) -> list[str]:
    path = os.path.expanduser(address)
    if os.path.exists(path):
        return [path]
    if "**" in path.split("/"):
        matches = list_pattern(path, folder_of(path) or ".", passed)
    else:
        matches = sorted(match for match in glob.glob(path) if os.path.isfile(match))
    if not matches:
        what = "pattern that matches no file" if glob.has_magic(path) else "file that does not exist"
        raise ThreestepError(f"--{flag}: '{address}' names a {what}; the folder read from is '{os.getcwd()}'")
    return matches


def _find_remote(address: str, endings: tuple[str, ...], flag: str, passed: PassedOver) -> list[str]:
    with _reading(address):
        import fsspec

        if "::" in address:  # one file inside another, such as zip://rows.csv::s3://bucket/rows.zip
            return [address]
        files, path = fsspec.core.url_to_fs(address)
        if glob.has_magic(path):
            paths = sorted(files.glob(path))
            if "**" in path:
                paths = without_hidden(paths, path.partition("**")[0], passed)
        elif files.isdir(path):
            found = [name for name in files.find(path) if name.endswith(endings) and holds_rows(name)]
            paths = sorted(without_hidden(found, path.rstrip("/"), passed))
            _check_found(paths, endings, address, flag=flag, passed=passed)
        else:
            paths = [path] if files.exists(path) else []
        if not paths:
            raise ThreestepError(f"--{flag}: '{address}' names no file")
        return [files.unstrip_protocol(name) for name in paths]


def _check_found(files: Sequence[str], endings: Sequence[str], folder: str, *, flag: str, passed: PassedOver) -> None:
    if not files:
        suffixes = [ending for ending in endings if not ending.endswith(_COMPRESSED)]
        but = f", but {len(passed.hidden)} hidden; name the folder they are in" if passed.hidden else ""
        raise ThreestepError(f"--{flag}: the folder '{folder}' holds no file that ends in {' or '.join(suffixes)}{but}")


def folder_of(address: str) -> str | None:
    """The folder that an address names, or that its files are in (of a glob, the one before the first pattern); None of
    a remote address."""
    if is_remote(address):
        return None
    folder = os.path.expanduser(address)
    while glob.has_magic(folder) and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder if os.path.isdir(folder) else os.path.dirname(folder) or "."


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


def content_of_files(files: Sequence[str], memo_dir: str | None) -> str:
    """A hash of local files' bytes, and of what stores report of remote ones (size, time, ETag): nothing is fetched."""
    return hash_text(" ".join(_content_of_file(name, memo_dir) for name in files))


def _content_of_file(name: str, memo_dir: str | None) -> str:
    if not is_remote(name):
        return digest_file(name, memo_dir)
    with _reading(name):
        import fsspec

        files, path = fsspec.core.url_to_fs(name)
        if redacted(name) == name:
            return f"{name} {files.checksum(path)}"
        # A new signature of the same file is no change, nor is another user. What a store reports may hold the address.
        return f"{redacted(name)} {json.dumps(redacted_value(files.info(path)), sort_keys=True, default=str)}"


@contextmanager
def open_stream(name: str) -> Iterator[io.BufferedReader]:
    """A file's bytes from the beginning, decompressed if they are those of a compressed file, whatever its name."""
    with _reading(name):
        if not is_remote(name):
            with open(name, "rb") as plain:
                yield unpacked(plain)
        else:
            import fsspec

            with fsspec.open(name, "rb", compression=None) as file:
                yield unpacked(file)


def without_compression(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return next((name.removesuffix(suffix) for suffix in _COMPRESSED if name.endswith(suffix)), name)


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


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn the dozen unrelated exceptions of file systems and decompressors into one sentence."""
    try:
        yield
    except ThreestepError:
        raise
    except UnicodeDecodeError as error:
        if error.encoding == "utf-8":
            raise
        raise ThreestepError(
            f"'{name}' begins as {error.encoding} and is not: {error.reason}; save it as UTF-8"
        ) from error
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        remedy = "install the package it names" if isinstance(error, ImportError) else "check the address"
        raise ThreestepError(f"'{name}' could not be read: {type(error).__name__}: {first_line}; {remedy}") from error
