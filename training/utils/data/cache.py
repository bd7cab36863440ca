"""Folders that are built once, published whole, and found again by what they were built from.

A folder is built beside its place under a file lock and appears by one rename, so what has the right name
is finished; what a killed build leaves has another name, and the next build of the same thing removes it.
Processes that want the same folder wait for the lock by polling, never inside a collective. Knows nothing
of rows or tokens.

What is verified when a folder is opened: the manifest (readable, this format, this fingerprint, these
parts), and of each file its size, its Arrow footer, and its sha256 where it is at most `CHECKED_BYTES`
long. A changed byte in the middle of a larger file is not looked for; `--rebuild_cache` builds it again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from training.utils.data.dataset import CachedSplit
from training.utils.data.fingerprint import hash_parts
from training.utils.run.errors import ThreestepError

CACHE_FORMAT = 2  # 2: rows of phase 2 have margins
CHECKED_BYTES = 16 * 2**20
_MANIFEST = "manifest.json"
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

    `build(folder)` writes Arrow files into an empty folder and returns {"splits": {split: {"rows": int,
    "tokens": int}}} (the files are `split`.arrow) and whatever else belongs into the manifest. With
    `rebuild` a folder that was there before this process began is built again. One line is logged:
    `resumed`, or `built` and why.
    """
    parts = {"cache format": str(CACHE_FORMAT), **parts}
    fingerprint = hash_parts(parts)
    final = os.path.join(cache_dir, f"{name}-{fingerprint[:20]}")
    _make_folder(cache_dir)
    reason = None
    if not rebuild:
        found, reason = _try_open(final, fingerprint, name, log)
        if found is not None:
            return found
    with _locked(final + ".lock", lambda: log(f"data: {name} waits for another process that builds it")):
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


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ThreestepError(
            f"data_output_path: the folder '{path}' cannot be made ({error.strerror}); name one you may "
            "write to"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ThreestepError(
            f"data_output_path: the folder '{path}' may not be written to; name one you may write to"
        )


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
    rows = ", ".join(f"{split['rows']:,} {key} rows" for key, split in manifest["splits"].items())
    log(f"data: {name} resumed in {time.perf_counter() - started:.2f} s: {rows}; {final}")
    return CachedFolder(final, splits, manifest, resumed=True), None


def _open(final: str, fingerprint: str) -> dict[str, CachedSplit]:
    """Open and verify; raises FileNotFoundError where there is no folder, Damaged where it is not sound."""
    if not os.path.isdir(final):
        raise FileNotFoundError(final)
    manifest = _read_manifest(final)
    if manifest is None:
        raise Damaged("no readable manifest")
    if hash_parts(manifest.get("parts", {})) != fingerprint:
        raise Damaged("its manifest belongs to something else")
    splits = {}
    for key, entry in manifest["splits"].items():
        path = os.path.join(final, entry["file"])
        try:
            size = os.path.getsize(path)
            if size != entry["bytes"]:
                raise Damaged(f"{entry['file']} has {size} bytes and should have {entry['bytes']}")
            if size <= CHECKED_BYTES and _sha256(path) != entry["sha256"]:
                raise Damaged(f"{entry['file']} has another checksum than its manifest says")
            splits[key] = CachedSplit(path, entry["rows"], manifest)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are OSError or ValueError
            raise Damaged(f"{entry['file']} does not open ({error})") from error
    return splits


def _read_manifest(folder: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(folder, _MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("splits"), dict) else None


def _build(
    final: str,
    fingerprint: str,
    parts: dict[str, str],
    build: Callable[[str], dict[str, Any]],
    reason: str,
) -> dict[str, Any]:
    """Build beside the place and publish by one rename; the lock is held."""
    parent, name = os.path.split(final)
    for leftover in os.listdir(parent):
        if leftover.startswith(f"{name}.building-") or leftover.startswith(f"{name}.old-"):
            shutil.rmtree(os.path.join(parent, leftover), ignore_errors=True)
    building = f"{final}.building-{os.getpid()}"
    os.mkdir(building)
    try:
        started = time.perf_counter()
        contents = build(building)
        splits = {}
        for key, counts in contents["splits"].items():
            path = os.path.join(building, f"{key}.arrow")
            splits[key] = {
                "file": f"{key}.arrow",
                **counts,
                "bytes": os.path.getsize(path),
                "sha256": _sha256(path),
            }
            _flush(path)
        manifest = {
            **contents,
            "fingerprint": fingerprint,
            "parts": parts,
            "splits": splits,
            "reason": reason,
            "build_seconds": round(time.perf_counter() - started, 3),
            "published_at_seconds": time.time(),
        }
        with open(os.path.join(building, _MANIFEST), "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, ensure_ascii=False)
        _flush(os.path.join(building, _MANIFEST))
        _flush(building)
        if os.path.isdir(final):
            os.rename(final, f"{final}.old-{os.getpid()}")
        os.rename(building, final)
        _flush(parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(f"{final}.old-{os.getpid()}", ignore_errors=True)
    return manifest


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


@contextmanager
def _locked(path: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel releases it when the process ends, however it ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    told = False
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    on_wait()
                    told = True
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _why_not_found(cache_dir: str, name: str, parts: dict[str, str]) -> str:
    """Which parts differ from the most similar folder that was built from the same datasets."""
    nearest: tuple[int, float, list[str]] | None = None
    for folder in os.listdir(cache_dir):
        path = os.path.join(cache_dir, folder)
        manifest = _read_manifest(path) if folder.startswith(f"{name}-") and os.path.isdir(path) else None
        if manifest is None or ".building-" in folder or ".old-" in folder:
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
