"""Files written with their checksum, flushed, verified and locked. Knows nothing of rows, shards or manifests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from training.utils.base.errors import ThreestepError, disk_errors

MOST_YAML_CHARACTERS = 4 << 20
MOST_YAML_VALUES = 100_000  # of a text whose aliases are written out


class HashedFile(io.BufferedWriter):
    """A new file with the `size_bytes`, `sha256` and `xxh3` of what was written; its OSErrors carry the file's name."""

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
        with disk_errors(self.path):
            written = super().write(content)
        self._digest.update(content)
        self._quick_digest.update(content)
        self.size_bytes += written
        return written

    def flush(self) -> None:
        with disk_errors(self.path):
            super().flush()

    def close(self) -> None:
        with disk_errors(self.path):
            super().close()

    def __exit__(self, *failure: object) -> None:
        try:
            self.close()
        except OSError:
            if failure[0] is None:  # otherwise the first error is already being raised
                raise


def write_json(path: str, content: Any) -> None:
    with disk_errors(path), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file in place of the one at `path`, which stays as it was if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def publish_folder(beside: Path, folder: Path) -> None:
    """Flush the folder `beside` to disk and put it in the place of `folder`, which stays as it was if that fails. A
    link there is replaced, not followed. Files get the permissions that the umask gives (safetensors 0.8 makes them
    for their owner alone)."""
    umask = os.umask(0o022)
    os.umask(umask)
    for path in sorted(beside.rglob("*")):
        if path.is_file():
            with suppress(OSError):  # as on file systems without permissions
                path.chmod(0o666 & ~umask)
        flush_to_disk(path)
    flush_to_disk(beside)
    old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    remove(old)
    has_old = os.path.lexists(folder)
    if has_old:
        os.rename(folder, old)
    try:
        os.rename(beside, folder)
    except OSError:
        if has_old:
            os.rename(old, folder)
        raise
    flush_to_disk(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a folder with all in it, or a link, not what it names. What cannot be removed stays."""
    with suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)


def json_object(given: str, flag: str) -> dict[str, Any]:
    """Return the object of a flag's value; ThreestepError for anything else, which names `flag`."""
    try:
        found = parse_json(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ThreestepError(f'{flag} expects a JSON object such as {{"ground_truth": "42"}}, got {given:.80}')
    return found


def parse_json(text: str | bytes, most_levels: int | None = None) -> Any:
    """json.loads, whose JSONDecodeError is also raised for values inside each other on more levels than Python reads,
    or than `most_levels`."""
    too_deep = json.JSONDecodeError("lists and objects are nested too deeply", "", 0)
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep from None
    inside, levels = [value], 0
    while most_levels is not None and (containers := [each for each in inside if isinstance(each, (dict, list))]):
        levels += 1
        if levels > most_levels:
            raise too_deep
        inside = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return value


class WrittenOutTooLong(ValueError):
    """Raised for YAML whose aliases stand for more than a file of settings holds."""


def parse_yaml(text: str) -> Any:
    """yaml.safe_load, whose ValueError is also raised for a text that is too long, values inside each other on too many
    levels, and aliases (`*name`) that stand for too many values or for what they are in."""
    import yaml

    if len(text) > MOST_YAML_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than {MOST_YAML_CHARACTERS:,}")
    sizes: dict[int, float] = {}

    def size_of(node: Any) -> float:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # while it is being counted: it is in itself
            inside = (
                node.value if isinstance(node, yaml.SequenceNode) else (part for pair in node.value for part in pair)
            )
            sizes[id(node)] = 1 + sum(map(size_of, inside))
        return sizes[id(node)]

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # Before values are made of it: merged mappings (`<<`) are written out then.
        if size_of(node) > MOST_YAML_VALUES:
            raise WrittenOutTooLong(f"its aliases expand to more than {MOST_YAML_VALUES:,} values")
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None


def read_json_object(path: str) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or it holds something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read())
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
    """SHA-256 of the object as JSON, whatever the order of its keys."""
    plain = json.loads(json.dumps(content))  # text keys, so that they are sorted as they will be read
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def flush_to_disk(path: str | Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with disk_errors(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def try_lock(path: str) -> int | None:
    """Lock a file, made if missing. Return a handle that holds the lock until it is closed; None if another has it."""
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
    """Hold a shared lock on an open file while it is open, so that no process can lock it exclusively."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_exclusively(path: str, until: ExitStack) -> bool:
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
