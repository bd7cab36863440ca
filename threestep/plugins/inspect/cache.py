"""List, verify and prune a cache folder.

    threestep inspect cache list   [--data_output_path DIR]
    threestep inspect cache verify [--data_output_path DIR]
    threestep inspect cache prune  [--data_output_path DIR] --keep_newest 5 | --older_than_days 30 |
                            --max_gigabytes 100 (several may be given)

`verify` reads every byte and exits with 1 if a file is damaged. `prune` does not ask, and prints what it removed;
age is time since last use, and folders in use by a build or a run are kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from training.utils.base.console import counted
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import lock_exclusively, try_lock
from training.utils.data.arguments import CacheArguments
from training.utils.data.cache.cache import BUILDING, LOCK, OLD, damage_of, entries_of, read_manifest
from training.utils.run.program import run_program

_DAY_SECONDS = 86400.0
_GIGABYTE = 10**9
# Whatever else is in that folder is neither judged nor removed.
_OURS = re.compile(rf"(\w+-[0-9a-f]{{20}})({re.escape(BUILDING)}|{re.escape(OLD)})?")


@dataclass(frozen=True)
class CacheEntry:
    """The files of one build in a cache folder. `manifest` is None where the build was never finished."""

    name: str
    path: str
    manifest: dict[str, Any] | None
    size_bytes: int
    used_at_seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    folder = os.path.abspath(os.path.expanduser(arguments.data_output_path))
    if not os.path.isdir(folder):
        raise ThreestepError(
            f"--data_output_path: the folder '{folder}' does not exist; pass the one that your runs use"
        )
    {"list": _list, "verify": _verify, "prune": _prune}[arguments.command](folder, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="threestep inspect cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("list", "list builds, most recently used first"),
        ("verify", "compare every file with its checksum"),
        ("prune", "remove builds by number, age or size"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument(
            "--data_output_path",
            default=CacheArguments.data_output_path,
            help="the cache folder (default: %(default)s)",
        )
    command.add_argument("--keep_newest", type=int, metavar="N", help="keep the N most recently used")
    command.add_argument("--older_than_days", type=float, metavar="DAYS", help="remove builds not used for DAYS days")
    command.add_argument(
        "--max_gigabytes", type=float, metavar="GB", help="keep the most recently used, at most GB gigabytes"
    )
    return parser


def entries(folder: str) -> list[CacheEntry]:
    """The builds of a cache folder, the last used first."""
    built = []
    for name in {match[1] for name in os.listdir(folder) if (match := _OURS.fullmatch(name))}:
        path = os.path.join(folder, name)
        sizes, times = [], [0.0]
        for each in _folders_of(path):
            for parent, _, files in os.walk(each):
                for file in files:
                    with suppress(OSError):  # a running build moves its files
                        state = os.stat(os.path.join(parent, file))
                        sizes.append(state.st_size)
                        times.append(state.st_mtime)
        built.append(CacheEntry(name, path, read_manifest(path), sum(sizes), max(times)))
    return sorted(built, key=lambda entry: (-entry.used_at_seconds, entry.name))


def _folders_of(path: str) -> tuple[str, ...]:
    return path, path + BUILDING, path + OLD


def _list(folder: str, arguments: argparse.Namespace) -> None:
    built = entries(folder)
    for entry in built:
        days = (time.time() - entry.used_at_seconds) / _DAY_SECONDS
        print(f"{entry.name}  {_size(entry.size_bytes)}  used {days:.1f} days ago  {_contents(entry)}")
    print(f"{len(built)} in {folder}, {_size(sum(entry.size_bytes for entry in built))}")


def _contents(entry: CacheEntry) -> str:
    if entry.manifest is None:
        return "unfinished: a build is running, or was stopped"
    splits = ", ".join(
        f"{name}: {counted(split['rows'], 'row')}, {counted(split['tokens'], 'token')}"
        for name, split in entry.manifest["splits"].items()
    )
    return f"{splits}  of {entry.manifest.get('parts', {}).get('datasets', '?')}"


def _verify(folder: str, arguments: argparse.Namespace) -> None:
    built = entries(folder)
    damaged = 0
    for entry in built:
        if entry.manifest is None:
            print(f"{entry.name}  unfinished; its shards are verified when its build resumes")
            continue
        wrong = [what for each in entries_of(entry.manifest).values() if (what := _damage(entry.path, each))]
        damaged += bool(wrong)
        print(f"{entry.name}  {'; '.join(wrong) or 'sound'}")
    if damaged:
        print(f"{damaged} of {len(built)} builds are damaged: run with --rebuild_cache, or remove their folders")
        sys.exit(1)


def _damage(folder: str, entry: dict[str, Any]) -> str | None:
    try:
        return damage_of(folder, entry, "sha256")
    except OSError as error:
        return f"{entry['file']} does not open ({error.strerror})"


def _prune(folder: str, arguments: argparse.Namespace) -> None:
    limits = (arguments.keep_newest, arguments.older_than_days, arguments.max_gigabytes)
    if all(limit is None for limit in limits) or any(limit is not None and limit < 0 for limit in limits):
        raise ThreestepError(
            "prune needs --keep_newest, --older_than_days or --max_gigabytes, each 0 or more, got "
            + ", ".join(str(limit) for limit in limits)
        )
    freed = 0
    for entry in entries_to_remove(entries(folder), *limits):
        if remove(entry):
            freed += entry.size_bytes
            print(f"removed {entry.name}  {_size(entry.size_bytes)}")
        else:
            print(f"kept {entry.name}: in use")
    left = sum(entry.size_bytes for entry in entries(folder))
    print(f"freed {_size(freed)}, {_size(left)} left in {folder}")


def entries_to_remove(
    built: Sequence[CacheEntry], keep_newest: int | None, older_than_days: float | None, max_gigabytes: float | None
) -> list[CacheEntry]:
    """The entries that exceed at least one limit; `built` has the last used first."""
    removed, kept_bytes = [], 0
    for place, entry in enumerate(built):
        unused_days = (time.time() - entry.used_at_seconds) / _DAY_SECONDS
        if (
            (keep_newest is not None and place >= keep_newest)
            or (older_than_days is not None and unused_days > older_than_days)
            or (max_gigabytes is not None and kept_bytes + entry.size_bytes > max_gigabytes * _GIGABYTE)
        ):
            removed.append(entry)
        else:
            kept_bytes += entry.size_bytes
    return removed


def remove(entry: CacheEntry) -> bool:
    """Remove an entry unless a build holds its lock or a program has one of its files open; return whether removed."""
    lock = try_lock(entry.path + LOCK)
    if lock is None:
        return False
    try:
        with ExitStack() as owned:
            splits = {} if entry.manifest is None else entry.manifest["splits"]
            if not all(lock_exclusively(os.path.join(entry.path, split["file"]), owned) for split in splits.values()):
                return False
            # Renamed first, so that nobody sees half of it.
            shutil.rmtree(entry.path + OLD, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(entry.path, entry.path + OLD)
            for path in filter(os.path.isdir, _folders_of(entry.path)):
                shutil.rmtree(path)
        os.remove(entry.path + LOCK)
    finally:
        os.close(lock)
    return True


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} GB"


if __name__ == "__main__":
    run_program(main)
