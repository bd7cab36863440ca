"""Folders that are built once, published whole, and found by the inputs that they were built from.

A folder is built next to its place under a file lock and published by one rename, so a folder with the right name is
finished. What a killed build leaves has another name, and the next build of the same thing resumes from it (see
`shards`). Processes that want the same folder wait for the lock by polling, never inside a collective. Knows nothing
of rows or tokens.

`docs/reference/cache.md` has the commands that list, verify and prune them.

Checked when a folder is opened: the manifest (readable, this format, this fingerprint, these parts, its own checksum),
and of each file its size, its Arrow footer and its checksum, whatever its size. A file of media beyond
`MEDIA_CHECKED_BYTES` is the exception: each medium is compared with its checksum when it is read.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.storage import (
    flush_to_disk,
    read_json_object,
    sha256_of,
    sha256_of_object,
    try_lock,
    write_json,
    xxh3_of,
)
from training.utils.contracts.rows import STORED_MEDIA
from training.utils.data.cache.workers import BuildStopped
from training.utils.data.files.digests import hash_parts

if TYPE_CHECKING:
    from training.utils.data.rows.dataset import CachedSplit

# 2: rows of phase 2 have margins; 3: the manifest has a checksum of itself; 4: rows have media
_FORMAT = {"cache format": "4"}
MEDIA_CHECKED_BYTES = 2**30
MANIFEST = "manifest.json"
LOCK = ".lock"
BUILDING = ".building"
OLD = ".old"
_SHARDS = "shards"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POLL_SECONDS = 0.1
_IMPORTED_AT = time.time()
_opened_here: set[str] = set()

Log = Callable[[str], None]


def silent(line: str) -> None:
    """The log of every rank but the main one."""


@dataclass(frozen=True)
class CachedFolder:
    """An opened folder: its splits by name, and whether it existed (`resumed`) or was built now."""

    path: str
    splits: dict[str, CachedSplit]
    resumed: bool

    @property
    def manifest(self) -> dict[str, Any]:
        return next(iter(self.splits.values())).manifest

    @property
    def rows_in_words(self) -> str:
        return ", ".join(f"{len(split):,} {key} rows" for key, split in self.splits.items())


def _process_started_at() -> float:
    """When this process began, in seconds since 1970: before its imports, which take longer than a small build."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime_seconds = float(file.read().split()[0])
        return time.time() - uptime_seconds + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT


class Damaged(Exception):
    """A folder with the right name whose content does not match its manifest."""


def is_built(cache_dir: str, name: str, parts: dict[str, str]) -> bool:
    """True if there is a folder that was built from `parts`."""
    return os.path.isdir(_folder(cache_dir, name, hash_parts({**_FORMAT, **parts})))


def _folder(cache_dir: str, name: str, fingerprint: str) -> str:
    return os.path.join(cache_dir, f"{name}-{fingerprint[:20]}")


def open_or_build(
    cache_dir: str, name: str, parts: dict[str, str], build: Callable[[str], dict[str, Any]], *, rebuild: bool, log: Log
) -> CachedFolder:
    """Open the folder that was built from `parts`, or build it: of several processes that call at once, one does.

    build: writes Arrow files into a folder that is empty or holds the shards of a stopped build, and returns {"splits":
        {split: fields of `dataset.Written`}} and whatever else belongs into the manifest.
    rebuild: build a folder that existed before this process began.
    Logs `read from the cache`; or why not, and then `tokenized in`. Raises BuildStopped, which names `cache_dir`, if
    the disk is full or not writable; an existing folder needs no write permission.
    """
    cache_dir = os.path.abspath(cache_dir)
    parts = {**_FORMAT, **parts}
    fingerprint = hash_parts(parts)
    final, shown = _folder(cache_dir, name, fingerprint), f"{name.replace('phase', 'step ').replace('_', ' ')} rows"
    if not rebuild:
        opened, _ = _try_open(final, fingerprint, shown, log)
        if opened is not None:
            return opened

    waiting = f"data: waiting for another process to tokenize {shown}"
    with _writing_into(cache_dir), locked(final + LOCK, on_wait=lambda: log(waiting)):
        opened, reason = _try_open(final, fingerprint, shown, log, only_fresh=rebuild)
        if opened is not None:
            return opened
        if rebuild:
            reason = "--rebuild_cache is set"
        elif reason is None:
            reason = _reason_to_build(cache_dir, name, parts)
        log(f"data: tokenizing {shown}: {reason}")
        started = time.perf_counter()
        _build(final, fingerprint, parts, build, reason=reason)
        built = CachedFolder(final, _open(final, fingerprint), resumed=False)
        _opened_here.add(final)
    log(f"data: {shown} tokenized in {time.perf_counter() - started:.1f} s: {built.rows_in_words}; {final}")
    return built


@contextmanager
def _writing_into(cache_dir: str) -> Iterator[None]:
    """Make the folder, and turn an OSError about a file in it into one sentence that names the folder."""
    try:
        os.makedirs(cache_dir, exist_ok=True)
        yield
    except OSError as error:
        path = os.path.abspath(str(error.filename))
        if error.filename is None or os.path.commonpath([cache_dir, path]) not in (cache_dir, path):
            raise  # a dataset's files, say
        if error.errno in _FULL:
            what = (
                f"the folder '{cache_dir}' is full ({error.strerror}): free some space and run again (finished shards "
                "are reused), or use another folder"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"the folder '{cache_dir}' is not writable ({error.strerror}); use one that is"
        else:
            what = f"the folder '{cache_dir}' cannot be created or written to ({error.strerror}); use another one"
        raise BuildStopped(f"--data_output_path: {what}") from error


def _try_open(
    final: str, fingerprint: str, name: str, log: Log, *, only_fresh: bool = False
) -> tuple[CachedFolder | None, str | None]:
    """The opened folder, or None and its mistake (None: there is no folder).

    only_fresh: published by another process since this one began (when several ranks are to rebuild, one does).
    """
    started = time.perf_counter()
    try:
        opened = CachedFolder(final, _open(final, fingerprint), resumed=True)
    except FileNotFoundError:
        return None, None
    except Damaged as damage:
        return None, f"the cached copy was damaged: {damage}"
    if only_fresh and (final in _opened_here or opened.manifest["published_at_seconds"] < _process_started_at()):
        return None, None
    _opened_here.add(final)
    with suppress(OSError):  # `prune` reads the time of the last use; a read-only folder is not pruned
        os.utime(os.path.join(final, MANIFEST))
    log(f"data: {name} read from the cache in {time.perf_counter() - started:.2f} s: {opened.rows_in_words}; {final}")
    return opened, None


def _open(final: str, fingerprint: str) -> dict[str, CachedSplit]:
    """Open and verify; raises FileNotFoundError where there is no folder, Damaged where it is damaged."""
    from training.utils.data.rows.dataset import CachedSplit  # imports pyarrow, which `--help` does not need

    if not os.path.isdir(final):
        raise FileNotFoundError(final)
    manifest = read_manifest(final)
    if manifest is None:
        raise Damaged("no readable manifest")
    if hash_parts(manifest.get("parts", {})) != fingerprint:
        raise Damaged("its manifest belongs to other data")
    if manifest.get("sha256") != sha256_of_object({key: manifest[key] for key in manifest if key != "sha256"}):
        raise Damaged("its manifest was changed")
    splits = {}
    for key, entry in entries_of(manifest).items():
        try:
            reads_all = key != STORED_MEDIA or entry["bytes"] <= MEDIA_CHECKED_BYTES
            if damage := damage_of(final, entry, "xxh3" if reads_all else None):
                raise Damaged(damage)
            if key != STORED_MEDIA:
                splits[key] = CachedSplit(os.path.join(final, entry["file"]), entry["rows"], manifest)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are OSError or ValueError
            raise Damaged(f"{entry['file']} does not open ({error})") from error
    return splits


def entries_of(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A manifest's entries of files by name: those of the splits, and that of media if rows have some."""
    media = manifest.get(STORED_MEDIA)
    return {**manifest["splits"], **({STORED_MEDIA: media} if media else {})}


def damage_of(folder: str, entry: dict[str, Any], checksum: str | None) -> str | None:
    """The difference between a file and its manifest's entry. checksum: the one to compare, if any; an earlier
    version's manifest has sha256 alone, which is then compared."""
    path = os.path.join(folder, entry["file"])
    size = os.path.getsize(path)
    if size != entry["bytes"]:
        return f"{entry['file']} has {size} bytes, expected {entry['bytes']}"
    by_xxh3 = checksum == "xxh3" and "xxh3" in entry
    if checksum and (xxh3_of(path) != entry["xxh3"] if by_xxh3 else sha256_of(path) != entry["sha256"]):
        return f"{entry['file']} does not match the checksum in its manifest"
    return None


def read_manifest(folder: str) -> dict[str, Any] | None:
    manifest = read_json_object(os.path.join(folder, MANIFEST))
    return manifest if manifest is not None and isinstance(manifest.get("splits"), dict) else None


def _build(
    final: str, fingerprint: str, parts: dict[str, str], build: Callable[[str], dict[str, Any]], *, reason: str
) -> None:
    """Build next to the place and publish by one rename; the lock is held."""
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
        for name in [*(entry["file"] for entry in entries_of(manifest).values()), MANIFEST]:
            flush_to_disk(os.path.join(building, name))
        shutil.rmtree(os.path.join(building, _SHARDS), ignore_errors=True)
        flush_to_disk(building)
        if os.path.isdir(final):
            os.rename(final, old)
        os.rename(building, final)
        flush_to_disk(os.path.dirname(final))
    except BaseException as failure:
        # Shards stay where the same build may yet succeed (a full disk, a stop from outside), not where the data or
        # the code must change first.
        finished = 0
        if isinstance(failure, (BuildStopped, OSError)) or not isinstance(failure, Exception):
            with suppress(OSError):
                finished = keep_finished_shards(building)
        if not finished:
            shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


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


def _reason_to_build(cache_dir: str, name: str, parts: dict[str, str]) -> str:
    """Names of the parts that differ from the most similar folder that was built from the same datasets."""
    candidates: list[tuple[int, float, list[str]]] = []
    for folder in os.listdir(cache_dir):
        path = os.path.join(cache_dir, folder)
        manifest = read_manifest(path) if folder.startswith(f"{name}-") and os.path.isdir(path) else None
        if manifest is None or folder.endswith((BUILDING, OLD)):
            continue
        old = manifest.get("parts", {})
        if old.get("datasets") == parts.get("datasets"):
            changed = [key for key in {**parts, **old} if old.get(key) != parts.get(key)]
            candidates.append((len(changed), -manifest.get("published_at_seconds", 0.0), changed))
    if not candidates:
        return "not cached yet"
    return "changed since the last build: " + ", ".join(min(candidates, key=lambda each: each[:2])[2])


# The files of shards: an Arrow file, and a JSON file that is written last and holds the shard's entry (the fields of a
# split's in the manifest, with the checksum of the Arrow file). The media of its rows, if any, are in a third file. All
# are in the subfolder `shards` of the folder that is being built, whose name holds the build's fingerprint.


def shard_path(folder: str, split: str, begin: int, end: int) -> str:
    """The Arrow file of a shard of the folder that is being built."""
    return os.path.join(folder, _SHARDS, f"{split}-{begin:09d}-{end:09d}.arrow")


def media_path(path: str) -> str:
    """The media of a shard."""
    return path.removesuffix(".arrow") + f".{STORED_MEDIA}"


def finish_shard(path: str, written: str, entry: dict[str, Any]) -> None:
    """Give the file `written` the shard's name, and that of its media, then mark it as finished."""
    if entry.get(STORED_MEDIA):
        os.replace(media_path(path) + ".part", media_path(path))
    os.replace(written, path)
    about = _about(path)
    write_json(about + ".part", {"key": _key(path), **entry})
    os.replace(about + ".part", about)


def finished_shard(path: str) -> dict[str, Any] | None:
    """The shard's entry if the shard exists, belongs to this build and has its checksums."""
    entry = read_json_object(_about(path))
    try:
        if not entry or entry["key"] != _key(path) or entry["sha256"] != sha256_of(path):
            return None
        media = entry.get(STORED_MEDIA)
        return entry if not media or media["sha256"] == sha256_of(media_path(path)) else None
    except (OSError, KeyError):
        return None


def keep_shards(folder: str, paths: Collection[str]) -> None:
    """Make the folder of the shards; remove all files from it except those of these shards."""
    stays = {*paths, *map(_about, paths), *map(media_path, paths)}
    shards = os.path.join(folder, _SHARDS)
    os.makedirs(shards, exist_ok=True)
    for name in os.listdir(shards):
        path = os.path.join(shards, name)
        if path not in stays:
            os.remove(path)


def keep_finished_shards(folder: str) -> int:
    """Remove everything from a folder that is being built except finished shards; returns how many those are."""
    for name in os.listdir(folder):
        if name != _SHARDS:
            os.remove(os.path.join(folder, name))
    shards = os.path.join(folder, _SHARDS)
    if not os.path.isdir(shards):
        return 0
    paths = [os.path.join(shards, name) for name in os.listdir(shards) if name.endswith(".arrow")]
    finished = [path for path in paths if os.path.exists(_about(path))]
    keep_shards(folder, finished)
    return len(finished)


def _about(path: str) -> str:
    return path.removesuffix(".arrow") + ".json"


def _key(path: str) -> str:
    """The name of the folder that is being built, which a shard belongs to."""
    return os.path.basename(os.path.dirname(os.path.dirname(path)))
