"""Hashes of texts and of files' contents; the hash of a large unchanged file is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from training.utils.base.storage import read_json_object, sha256_of

# Smaller files are always hashed; the hash of a larger one is remembered with its size, times and inode.
_ALWAYS_HASHED_BYTES = 4 * 2**20
# A file may change twice within one tick of the clock, so the hash of a recent change is not remembered.
_SETTLED_SECONDS = 2.0
_MEMO_NAME = "file_digests.json"


def hash_parts(parts: dict[str, str]) -> str:
    """One sha256 over all parts, in an order that does not matter."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_files(paths: Iterable[str], memo_dir: str | None) -> str:
    """The sha256 of several files' contents, in order. With `memo_dir`, large unchanged files are read only once."""
    return hash_text("".join(digest_file(path, memo_dir) for path in paths))


def digest_file(path: str, memo_dir: str | None) -> str:
    """The sha256 of a file's content.

    With `memo_dir` the hash of a large file is stored there, and trusted while size, modification time, change time and
    inode are the same (a change whose modification time was set back is still noticed by the change time).
    """
    state = os.stat(path)
    key = os.path.realpath(path)
    stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    remembers = memo_dir is not None and state.st_size > _ALWAYS_HASHED_BYTES
    memo_path = os.path.join(memo_dir or "", _MEMO_NAME)
    memo = _read_memo(memo_path) if remembers else {}
    if key in memo and memo[key][:4] == stamp:
        return memo[key][4]
    digest = sha256_of(path)
    if remembers and time.time() - max(state.st_mtime, state.st_ctime) > _SETTLED_SECONDS:
        memo[key] = [*stamp, digest]
        _write_memo(memo_path, memo)
    return digest


def _read_memo(path: str) -> dict[str, list[Any]]:
    memo = read_json_object(path) or {}
    return memo if all(isinstance(entry, list) and len(entry) == 5 for entry in memo.values()) else {}


def _write_memo(path: str, memo: dict[str, list[Any]]) -> None:
    """Write the memo whole or not at all; a lost or refused write costs one more hashing."""
    temporary = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=_MEMO_NAME)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(memo, file)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.remove(temporary)
