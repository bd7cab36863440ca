"""Splits built a shard at a time, by several processes, and joined.

A shard is what a fixed range of raw rows becomes: an Arrow file with a small JSON file beside it that is written
last and holds its checksum. A build that is killed leaves its finished shards, and the next one of the same thing uses
those that are still what their checksum says. Which rows make a shard depends on the number of raw rows alone, and
joining cuts the rows into batches anew, so the result has the same bytes for any number of workers or shards.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.data.dataset import SplitWriter, join_files
from training.utils.data.phases import Row
from training.utils.data.reports import Counts
from training.utils.data.storage import read_json_object, sha256_of, write_json
from training.utils.data.workers import run_jobs, worker_count
from training.utils.run.metrics import progress_bar

# Enough shards to keep 64 cores busy to the end, few enough files, and enough texts for a tokenizer's call.
_SHARDS = 256
_LEAST_ROWS, _MOST_ROWS = 512, 8192
_FOLDER = "shards"

Say = Callable[[str], None]


@dataclass(frozen=True)
class SplitPlan:
    """How one split is made: `make(begin, end, counts)` gives the rows that its raw rows begin .. end - 1 become,
    whoever asks and in whatever order, and adds to `counts`.
    """

    name: str
    row_type: type
    raw_rows: int
    make: Callable[[int, int, Counts], Iterator[Row]]


@dataclass(frozen=True)
class Shard:
    """A finished shard: raw rows `begin` .. `end` - 1 of a split. `file` stands in the folder of the shards."""

    split: str
    begin: int
    end: int
    file: str
    rows: int
    tokens: int
    truncated: int
    dropped: dict[str, int]
    bytes: int
    sha256: str


@dataclass(frozen=True)
class BuiltShards:
    """The shards of one split in order, and their sums."""

    folder: str
    row_type: type
    shards: list[Shard]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def counts(self) -> Counts:
        dropped: Counter[str] = Counter()
        for shard in self.shards:
            dropped.update(shard.dropped)
        return Counts(sum(shard.truncated for shard in self.shards), dropped)

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.folder, shard.file) for shard in self.shards]

    def join(self, path: str) -> dict[str, Any]:
        """Write the rows of all shards to one file; returns what the manifest says of it."""
        written = join_files(self.paths, path, self.row_type)
        return {**asdict(written), **self.counts.as_json()}


def shard_ranges(raw_rows: int) -> list[tuple[int, int]]:
    """The raw rows of each shard: all of one length but the last."""
    length = min(_MOST_ROWS, max(_LEAST_ROWS, math.ceil(raw_rows / _SHARDS)))
    return [(begin, min(begin + length, raw_rows)) for begin in range(0, raw_rows, length)]


def build_shards(
    folder: str, plans: Sequence[SplitPlan], num_workers: int | None, say: Say
) -> dict[str, BuiltShards]:
    """Make every shard of every split that `folder` does not have yet, in as many processes as
    `workers.worker_count` says. A bar is drawn on a terminal.
    """
    shards_folder = os.path.join(folder, _FOLDER)
    os.makedirs(shards_folder, exist_ok=True)
    wanted = [(plan, begin, end) for plan in plans for begin, end in shard_ranges(plan.raw_rows)]
    found = [_finished(shards_folder, plan.name, begin, end) for plan, begin, end in wanted]
    _sweep(shards_folder, [shard for shard in found if shard is not None])
    missing = [number for number, shard in enumerate(found) if shard is None]
    if len(missing) < len(wanted):
        say(f"data: {len(wanted) - len(missing)} of {len(wanted)} shards were finished by a build that was stopped")

    def work(job: int) -> dict[str, Any]:
        plan, begin, end = wanted[missing[job]]
        return asdict(_build_shard(shards_folder, plan, begin, end))

    raw_rows = sum(end - begin for _, begin, end in wanted)
    to_build = sum(wanted[number][2] - wanted[number][1] for number in missing)
    tokens = 0
    with progress_bar(raw_rows, "data", is_main_rank=True, unit="row", on_terminal_only=True) as bar:
        bar.update(raw_rows - to_build)
        bar.initial = raw_rows - to_build  # so that the rate is this run's own
        for job, answer in run_jobs(len(missing), work, worker_count(num_workers, to_build)):
            shard = found[missing[job]] = Shard(**answer)
            tokens += shard.tokens
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(seconds, 1e-9):,.0f} tokens/s", refresh=False)
            bar.update(shard.end - shard.begin)
    done = [shard for shard in found if shard is not None]
    return {
        plan.name: BuiltShards(shards_folder, plan.row_type, [shard for shard in done if shard.split == plan.name])
        for plan in plans
    }


def drop_shards(folder: str) -> None:
    """Remove the shards of a folder whose splits are joined."""
    shards_folder = os.path.join(folder, _FOLDER)
    if os.path.isdir(shards_folder):
        shutil.rmtree(shards_folder)


def keep_finished_shards(folder: str) -> int:
    """Remove everything from a folder that is being built but its finished shards; returns how many those are."""
    for name in os.listdir(folder):
        if name != _FOLDER:
            os.remove(os.path.join(folder, name))
    shards_folder = os.path.join(folder, _FOLDER)
    names = set(os.listdir(shards_folder)) if os.path.isdir(shards_folder) else set()
    finished = {name.removesuffix(".json") for name in names if name.endswith(".json")}
    for name in names:
        if os.path.splitext(name)[0] not in finished or name.endswith(".part"):
            os.remove(os.path.join(shards_folder, name))
    return len(finished)


def _build_shard(folder: str, plan: SplitPlan, begin: int, end: int) -> Shard:
    """Write a shard under another name, then its JSON file, whose presence says that the shard is finished."""
    path = os.path.join(folder, _name(plan.name, begin, end))
    counts = Counts()
    with SplitWriter(path + ".part", plan.row_type) as writer:
        for row in plan.make(begin, end, counts):
            writer.append(row)
    shard = Shard(
        split=plan.name,
        begin=begin,
        end=end,
        file=os.path.basename(path) + ".arrow",
        **asdict(writer.written),
        **counts.as_json(),
    )
    os.replace(path + ".part", path + ".arrow")
    write_json(path + ".json.part", {"key": _key(folder), **asdict(shard)})
    os.replace(path + ".json.part", path + ".json")
    return shard


def _finished(folder: str, split: str, begin: int, end: int) -> Shard | None:
    """The shard where it is there, belongs here and is what its checksum says."""
    name = _name(split, begin, end)
    entry = read_json_object(os.path.join(folder, name + ".json"))
    path = os.path.join(folder, name + ".arrow")
    try:
        if entry is None or entry.pop("key", None) != _key(folder) or sha256_of(path) != entry["sha256"]:
            return None
        return Shard(**entry)
    except (OSError, KeyError, TypeError):
        return None


def _sweep(folder: str, keep: Sequence[Shard]) -> None:
    """Remove what a killed build left half-written, and what is damaged."""
    kept = {shard.file for shard in keep} | {shard.file.removesuffix(".arrow") + ".json" for shard in keep}
    for name in os.listdir(folder):
        if name not in kept:
            os.remove(os.path.join(folder, name))


def _name(split: str, begin: int, end: int) -> str:
    return f"{split}-{begin:09d}-{end:09d}"


def _key(folder: str) -> str:
    """What the shards of a folder belong to: the name of the folder that is being built holds the fingerprint."""
    return os.path.basename(os.path.dirname(folder))
