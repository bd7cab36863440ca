"""Folders that are built once, published whole, and found again by what they were built from.

A folder is built beside its place under a file lock and appears by one rename, so what has the right name
is finished; what a killed build leaves has another name, and the next build of the same thing goes on from there
(see `shards`). Processes that want the same folder wait for the lock by polling, never inside a collective. Knows
nothing of rows or tokens.

    python -m training.utils.data.cache list | verify | prune    (see `cache_program`)

What is verified when a folder is opened: the manifest (readable, this format, this fingerprint, these
parts, its own checksum), and of each file its size, its Arrow footer, and its sha256 where it is at most
`CHECKED_BYTES` long. A changed byte in the middle of a larger file is not looked for; `--rebuild_cache` builds it
again.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.data.fingerprint import hash_parts
from training.utils.data.shard_files import drop_shards, keep_finished_shards
from training.utils.data.workers import BuildStopped
from training.utils.run.storage import (
    flush_to_disk,
    read_json_object,
    sha256_of,
    sha256_of_object,
    try_lock,
    write_json,
)

if TYPE_CHECKING:
    from training.utils.data.dataset import CachedSplit

CACHE_FORMAT = 3  # 2: rows of phase 2 have margins; 3: the manifest has a checksum of itself
CHECKED_BYTES = 16 * 2**20
MANIFEST = "manifest.json"
LOCK = ".lock"
BUILDING = ".building"
OLD = ".old"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POLL_SECONDS = 0.1
_IMPORTED_AT = time.time()
_opened_here: set[str] = set()

Log = Callable[[str], None]


def silent(line: str) -> None:
    """The log of a rank that says nothing."""


@dataclass(frozen=True)
class CachedFolder:
    """An opened folder: its splits by name, its manifest, and whether it was found (`resumed`) or built
    now.
    """

    path: str
    splits: dict[str, CachedSplit]
    manifest: dict[str, Any]
    resumed: bool


def _process_started_at() -> float:
    """When this process began, in seconds since 1970: before its imports, which take longer than a small
    build.
    """
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime_seconds = float(file.read().split()[0])
        return time.time() - uptime_seconds + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT


class Damaged(Exception):
    """A folder with the right name whose content is not what its manifest says."""


def open_or_build(
    cache_dir: str,
    name: str,
    parts: dict[str, str],
    build: Callable[[str], dict[str, Any]],
    rebuild: bool,
    log: Log,
) -> CachedFolder:
    """Open the folder that was built from `parts`, or build it: exactly one of the processes that ask at
    once does.

    `build(folder)` writes Arrow files into a folder that holds nothing, or the shards of a build that was
    stopped, and returns {"splits": {split: what `dataset.Written` says of `split`.arrow}} and whatever else belongs
    into the manifest. With `rebuild` a folder that was there before this process began is built again. One line is
    logged: `resumed`, or `built` and why. Raises BuildStopped, which names `cache_dir`, where the disk is full or
    may not be written to; a folder that is there needs no permission to write.
    """
    cache_dir = os.path.abspath(cache_dir)
    parts = {"cache format": str(CACHE_FORMAT), **parts}
    fingerprint = hash_parts(parts)
    final = os.path.join(cache_dir, f"{name}-{fingerprint[:20]}")
    reason = None
    if not rebuild:
        found, reason = _try_open(final, fingerprint, name, log)
        if found is not None:
            return found

    def waiting() -> None:
        log(f"data: {name} waits for another process that builds it")

    with _writing_into(cache_dir), locked(final + LOCK, waiting):
        found, reason = _try_open(final, fingerprint, name, log, only_fresh=rebuild)
        if found is not None:
            return found
        if rebuild:
            reason = "rebuild_cache was asked for"
        elif reason is None:
            reason = _why_not_found(cache_dir, name, parts)
        log(f"data: {name} is being built: {reason}")
        started = time.perf_counter()
        manifest = _build(final, fingerprint, parts, build, reason)
        opened = _open(final, fingerprint)
        _opened_here.add(final)
    rows = ", ".join(f"{split['rows']:,} {key} rows" for key, split in manifest["splits"].items())
    log(f"data: {name} built in {time.perf_counter() - started:.1f} s ({reason}): {rows}; {final}")
    return CachedFolder(final, opened, manifest, resumed=False)


@contextmanager
def _writing_into(cache_dir: str) -> Iterator[None]:
    """The folder is there, and an OSError inside about a file in it becomes one sentence that names the folder."""
    try:
        os.makedirs(cache_dir, exist_ok=True)
        yield
    except OSError as error:
        if error.filename is None or not _lies_on_one_line(cache_dir, os.path.abspath(str(error.filename))):
            raise  # a dataset's own files, say
        if error.errno in _FULL:
            what = (
                f"the folder '{cache_dir}' has no room left ({error.strerror}): free some and run again (what was "
                "finished is kept and used), or name another one"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"the folder '{cache_dir}' may not be written to ({error.strerror}); name one you may write to"
        else:
            what = f"the folder '{cache_dir}' cannot be made or written to ({error.strerror}); name another one"
        raise BuildStopped(f"data_output_path: {what}") from error


def _lies_on_one_line(folder: str, path: str) -> bool:
    """Whether one is the other or stands in it."""
    return os.path.commonpath([folder, path]) in (folder, path)


def _try_open(
    final: str, fingerprint: str, name: str, log: Log, only_fresh: bool = False
) -> tuple[CachedFolder | None, str | None]:
    """The opened folder, or None and what is wrong with what is there (None: nothing is there).

    With `only_fresh`, a folder counts only if another process published it since this one began: when
    several ranks are told to rebuild, one does.
    """
    started = time.perf_counter()
    try:
        splits = _open(final, fingerprint)
    except FileNotFoundError:
        return None, None
    except Damaged as damage:
        return None, f"the cached one was damaged: {damage}"
    manifest = next(iter(splits.values())).manifest
    if only_fresh and (final in _opened_here or manifest["published_at_seconds"] < _process_started_at()):
        return None, None
    _opened_here.add(final)
    with suppress(OSError):  # `prune` goes by when a folder was last used; one that is read-only is not pruned
        os.utime(os.path.join(final, MANIFEST))
    rows = ", ".join(f"{split['rows']:,} {key} rows" for key, split in manifest["splits"].items())
    log(f"data: {name} resumed in {time.perf_counter() - started:.2f} s: {rows}; {final}")
    return CachedFolder(final, splits, manifest, resumed=True), None


def _open(final: str, fingerprint: str) -> dict[str, CachedSplit]:
    """Open and verify; raises FileNotFoundError where there is no folder, Damaged where it is not sound."""
    from training.utils.data.dataset import CachedSplit  # pyarrow, which `--help` does without

    if not os.path.isdir(final):
        raise FileNotFoundError(final)
    manifest = read_manifest(final)
    if manifest is None:
        raise Damaged("no readable manifest")
    if hash_parts(manifest.get("parts", {})) != fingerprint:
        raise Damaged("its manifest belongs to something else")
    if manifest.get("sha256") != sha256_of_object(_without_checksum(manifest)):
        raise Damaged("its manifest has another content than was written")
    splits = {}
    for key, entry in manifest["splits"].items():
        path = os.path.join(final, entry["file"])
        try:
            size = os.path.getsize(path)
            if size != entry["bytes"]:
                raise Damaged(f"{entry['file']} has {size} bytes and should have {entry['bytes']}")
            if size <= CHECKED_BYTES and sha256_of(path) != entry["sha256"]:
                raise Damaged(f"{entry['file']} has another checksum than its manifest says")
            splits[key] = CachedSplit(path, entry["rows"], manifest)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are OSError or ValueError
            raise Damaged(f"{entry['file']} does not open ({error})") from error
    return splits


def read_manifest(folder: str) -> dict[str, Any] | None:
    manifest = read_json_object(os.path.join(folder, MANIFEST))
    return manifest if manifest is not None and isinstance(manifest.get("splits"), dict) else None


def _without_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key != "sha256"}


def _build(
    final: str,
    fingerprint: str,
    parts: dict[str, str],
    build: Callable[[str], dict[str, Any]],
    reason: str,
) -> dict[str, Any]:
    """Build beside the place and publish by one rename; the lock is held."""
    building, old = final + BUILDING, final + OLD
    shutil.rmtree(old, ignore_errors=True)
    os.makedirs(building, exist_ok=True)
    keep_finished_shards(building)
    try:
        started = time.perf_counter()
        contents = build(building)
        splits = {key: {"file": f"{key}.arrow", **written} for key, written in contents["splits"].items()}
        manifest = {
            **contents,
            "fingerprint": fingerprint,
            "parts": parts,
            "splits": splits,
            "reason": reason,
            "build_seconds": round(time.perf_counter() - started, 3),
            "published_at_seconds": time.time(),
        }
        manifest["sha256"] = sha256_of_object(manifest)
        write_json(os.path.join(building, MANIFEST), manifest)
        for name in [*(entry["file"] for entry in splits.values()), MANIFEST]:
            flush_to_disk(os.path.join(building, name))
        drop_shards(building)
        flush_to_disk(building)
        if os.path.isdir(final):
            os.rename(final, old)
        os.rename(building, final)
        flush_to_disk(os.path.dirname(final))
    except BaseException as failure:
        _clear_up(building, failure)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def _clear_up(building: str, failure: BaseException) -> None:
    """After a failure: shards stay where the same build may yet succeed (a full disk, a stop from outside), not
    where the data or the code has to change first.
    """
    finished = 0
    if isinstance(failure, (BuildStopped, OSError)) or not isinstance(failure, Exception):
        with suppress(OSError):
            finished = keep_finished_shards(building)
    if not finished:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def locked(path: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel releases it when the process ends, however it ends."""
    handle = try_lock(path)
    if handle is None:
        on_wait()
    while handle is None:
        time.sleep(_POLL_SECONDS)
        handle = try_lock(path)
    try:
        yield
    finally:
        os.close(handle)


def _why_not_found(cache_dir: str, name: str, parts: dict[str, str]) -> str:
    """Which parts differ from the most similar folder that was built from the same datasets."""
    nearest: tuple[int, float, list[str]] | None = None
    for folder in os.listdir(cache_dir):
        path = os.path.join(cache_dir, folder)
        manifest = read_manifest(path) if folder.startswith(f"{name}-") and os.path.isdir(path) else None
        if manifest is None or folder.endswith((BUILDING, OLD)):
            continue
        old = manifest.get("parts", {})
        if old.get("datasets") != parts.get("datasets"):
            continue
        changed = [key for key in {**parts, **old} if old.get(key) != parts.get(key)]
        candidate = (len(changed), -manifest.get("published_at_seconds", 0.0), changed)
        if nearest is None or candidate[:2] < nearest[:2]:
            nearest = candidate
    if nearest is None:
        return "none was built from these datasets before"
    return "changed since the last one: " + ", ".join(nearest[2])


if __name__ == "__main__":
    from training.utils.data.cache_program import main
    from training.utils.run.program import run_program

    run_program(main)
