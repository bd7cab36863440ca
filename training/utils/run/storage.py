"""Files written with their checksum, flushed, verified and locked. Knows nothing of rows, shards or manifests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class HashedFile(io.BufferedWriter):
    """A new file with the `size_bytes`, `sha256` and `xxh3` of what was written so far. Its OSErrors carry the file's
    name."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path, "w"), buffer_size=2**20)
        self.path = path
        self.size_bytes = 0
        self._digest = hashlib.sha256()
        self._quick_digest = _quick_digest()

    @property
    def xxh3(self) -> str:
        return self._quick_digest.hexdigest()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, content: Any) -> int:
        with naming(self.path):
            written = super().write(content)
        self._digest.update(content)
        self._quick_digest.update(content)
        self.size_bytes += written
        return written

    def flush(self) -> None:
        with naming(self.path):
            super().flush()

    def close(self) -> None:
        with naming(self.path):
            super().close()

    def __exit__(self, *failure: object) -> None:
        try:
            self.close()
        except OSError:
            if failure[0] is None:  # otherwise the first error is already being raised
                raise


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Give an OSError inside the file name `path` if it has none, as after a failed write."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def write_json(path: str, content: Any) -> None:
    with naming(path), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file in place of the one at `path`, which stays as it was if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def read_json_object(path: str) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or it holds something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sha256_of(path: str | Path) -> str:
    return _digest_of(path, hashlib.sha256())


def xxh3_of(path: str | Path) -> str:
    """A checksum of 128 bits against accidents, not against attacks: several times as fast as sha256."""
    return _digest_of(path, _quick_digest())


def _quick_digest() -> Any:
    import xxhash

    return xxhash.xxh3_128()


def _digest_of(path: str | Path, digest: Any) -> str:
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_object(content: dict[str, Any]) -> str:
    """Of the object as JSON, whatever the order of its keys."""
    plain = json.loads(json.dumps(content))  # text keys, so that they are sorted as they will be read
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def flush_to_disk(path: str | Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(str(path)):
            os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def try_lock(path: str) -> int | None:
    """Lock a file, made if missing. Return a handle that holds the lock until it is closed; None if another process
    holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file: a lock on a file without a name excludes nobody.
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(handle)
        error.filename = path
        raise
    os.close(handle)
    return None


def share(file: IO[Any]) -> None:
    """Hold a shared lock on an open file while it is open, so that nobody can own it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def try_to_own(path: str, until: ExitStack) -> bool:
    """Hold a file exclusively until `until` ends; False if any process shares it."""
    try:
        file = until.enter_context(open(path, "r+b"))  # some file systems need write access for an exclusive lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.EOPNOTSUPP)  # without locks nobody can hold one
    return True
