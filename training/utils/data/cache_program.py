"""A look at a cache folder, and a broom: what is in it, whether it is sound, and what may go.

    python -m training.utils.data.cache list   [--data_output_path DIR]
    python -m training.utils.data.cache verify [--data_output_path DIR]
    python -m training.utils.data.cache prune  [--data_output_path DIR] --keep_newest 5 | --older_than_days 30 |
                                               --max_gigabytes 100 (several may be given)

`verify` reads every byte and ends with code 1 where something is damaged. `prune` asks nothing and says what it
removed; it counts from the last use, and never touches what a build or a running program holds.
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

from training.utils.data.arguments import DataArguments
from training.utils.data.cache import BUILDING, LOCK, OLD, read_manifest
from training.utils.run.errors import ThreestepError
from training.utils.run.storage import sha256_of, try_lock, try_to_own

_DAY_SECONDS = 86400.0
_GIGABYTE = 10**9
# Nothing else that somebody keeps in that folder is ours to judge or remove.
_OURS = re.compile(rf"(\w+-[0-9a-f]{{20}})({re.escape(BUILDING)}|{re.escape(OLD)})?")


@dataclass(frozen=True)
class Entry:
    """All that a cache folder holds of one build. `manifest` is None where the build was never finished."""

    name: str
    path: str
    manifest: dict[str, Any] | None
    size_bytes: int
    used_at_seconds: float

    @property
    def folders(self) -> list[str]:
        return [path for path in _folders_of(self.path) if os.path.isdir(path)]

    @property
    def files(self) -> list[str]:
        """The finished splits."""
        splits = {} if self.manifest is None else self.manifest["splits"]
        return [os.path.join(self.path, entry["file"]) for entry in splits.values()]


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks."""
    arguments = _parser().parse_args(argv)
    folder = os.path.abspath(os.path.expanduser(arguments.data_output_path))
    if not os.path.isdir(folder):
        raise ThreestepError(f"data_output_path: there is no folder '{folder}'; name the one that runs were given")
    {"list": _list, "verify": _verify, "prune": _prune}[arguments.command](folder, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.utils.data.cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("list", "what is in the cache, the last used first"),
        ("verify", "compare every file with its checksum"),
        ("prune", "remove what was not used for long"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument(
            "--data_output_path", default=DataArguments.data_output_path, help="the cache (default: %(default)s)"
        )
    command.add_argument("--keep_newest", type=int, metavar="N", help="keep the N last used")
    command.add_argument("--older_than_days", type=float, metavar="DAYS", help="remove what was not used for so long")
    command.add_argument("--max_gigabytes", type=float, metavar="GB", help="keep the last used that fit into so much")
    return parser


def entries(folder: str) -> list[Entry]:
    """What a cache folder holds, the last used first."""
    names = {match[1] for name in os.listdir(folder) if (match := _OURS.fullmatch(name))}
    found = []
    for name in names:
        path = os.path.join(folder, name)
        manifest = read_manifest(path)
        sizes, times = [], [0.0]
        for each in _folders_of(path):
            for parent, _, files in os.walk(each):
                for file in files:
                    with suppress(OSError):  # a build beside us moves its files
                        state = os.stat(os.path.join(parent, file))
                        sizes.append(state.st_size)
                        times.append(state.st_mtime)
        found.append(Entry(name, path, manifest, sum(sizes), max(times)))
    return sorted(found, key=lambda entry: (-entry.used_at_seconds, entry.name))


def _folders_of(path: str) -> tuple[str, ...]:
    return path, path + BUILDING, path + OLD


def _list(folder: str, arguments: argparse.Namespace) -> None:
    found = entries(folder)
    for entry in found:
        days = (time.time() - entry.used_at_seconds) / _DAY_SECONDS
        print(f"{entry.name}  {_size(entry.size_bytes)}  used {days:.1f} days ago  {_contents(entry)}")
    print(f"{len(found)} in {folder}, {_size(sum(entry.size_bytes for entry in found))}")


def _contents(entry: Entry) -> str:
    if entry.manifest is None:
        return "unfinished: a build is at it, or was stopped"
    splits = ", ".join(
        f"{name}: {split['rows']:,} rows, {split['tokens']:,} tokens"
        for name, split in entry.manifest["splits"].items()
    )
    return f"{splits}  of {entry.manifest.get('parts', {}).get('datasets', '?')}"


def _verify(folder: str, arguments: argparse.Namespace) -> None:
    found = entries(folder)
    damaged = 0
    for entry in found:
        if entry.manifest is None:
            print(f"{entry.name}  unfinished; its shards are verified when its build goes on")
            continue
        wrong = [what for split in entry.manifest["splits"].values() if (what := _what_is_wrong(entry.path, split))]
        damaged += bool(wrong)
        print(f"{entry.name}  {'; '.join(wrong) or 'sound'}")
    if damaged:
        print(f"{damaged} of {len(found)} damaged: run with --rebuild_cache, or remove the folder")
        sys.exit(1)


def _what_is_wrong(folder: str, split: dict[str, Any]) -> str:
    path = os.path.join(folder, split["file"])
    try:
        if os.path.getsize(path) != split["bytes"]:
            return f"{split['file']} has {os.path.getsize(path)} bytes and should have {split['bytes']}"
        if sha256_of(path) != split["sha256"]:
            return f"{split['file']} has another checksum than its manifest says"
    except OSError as error:
        return f"{split['file']} does not open ({error.strerror})"
    return ""


def _prune(folder: str, arguments: argparse.Namespace) -> None:
    limits = (arguments.keep_newest, arguments.older_than_days, arguments.max_gigabytes)
    if all(limit is None for limit in limits) or any(limit is not None and limit < 0 for limit in limits):
        raise ThreestepError(
            "prune: expected --keep_newest, --older_than_days or --max_gigabytes, a number of 0 or more, got "
            + ", ".join(str(limit) for limit in limits)
            + "; say how much may stay"
        )
    freed = 0
    for entry in chosen_to_go(entries(folder), *limits):
        if remove(entry):
            freed += entry.size_bytes
            print(f"removed {entry.name}  {_size(entry.size_bytes)}")
        else:
            print(f"kept {entry.name}: in use")
    left = sum(entry.size_bytes for entry in entries(folder))
    print(f"freed {_size(freed)}, {_size(left)} left in {folder}")


def chosen_to_go(
    found: Sequence[Entry], keep_newest: int | None, older_than_days: float | None, max_gigabytes: float | None
) -> list[Entry]:
    """What at least one of the limits does not let stay; `found` has the last used first."""
    go, kept_bytes = [], 0
    for place, entry in enumerate(found):
        unused_days = (time.time() - entry.used_at_seconds) / _DAY_SECONDS
        if (
            (keep_newest is not None and place >= keep_newest)
            or (older_than_days is not None and unused_days > older_than_days)
            or (max_gigabytes is not None and kept_bytes + entry.size_bytes > max_gigabytes * _GIGABYTE)
        ):
            go.append(entry)
        else:
            kept_bytes += entry.size_bytes
    return go


def remove(entry: Entry) -> bool:
    """Remove an entry unless a build holds its lock or a program has one of its files open; returns whether it did."""
    lock = try_lock(entry.path + LOCK)
    if lock is None:
        return False
    try:
        with ExitStack() as owned:
            if not all(try_to_own(path, owned) for path in entry.files):
                return False
            # Renamed first: whoever comes now sees nothing, and not half of it.
            shutil.rmtree(entry.path + OLD, ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(entry.path, entry.path + OLD)
            for path in entry.folders:
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
