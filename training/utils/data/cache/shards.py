"""Splits built a shard at a time, by several processes, and joined.

A shard is the result of a fixed range of raw rows. A killed build leaves its finished shards, and the next build of the
same thing uses those whose checksum still fits. The ranges depend only on the number of raw rows, and joining cuts the
rows into new batches, so the result has the same bytes for any number of workers or shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.data.cache.reports import Counts
from training.utils.data.cache.shard_files import (
    Shard,
    finish_shard,
    finished_shard,
    keep_shards,
    make_shards_folder,
    shard_path,
)
from training.utils.data.cache.workers import run_jobs, worker_count
from training.utils.data.rows.dataset import SplitWriter, join_files
from training.utils.data.rows.phases import Row
from training.utils.run.console import progress_bar

# Enough shards to keep 64 cores busy to the end, not too many files, and enough texts for a call of the tokenizer.
_SHARDS = 256
_LEAST_ROWS, _MOST_ROWS = 512, 8192

Log = Callable[[str], None]


@dataclass(frozen=True)
class SplitPlan:
    """One split: `make(begin, end, counts)` yields rows of raw rows begin .. end - 1 in any process and counts."""

    name: str
    row_type: type
    raw_rows: int
    make: Callable[[int, int, Counts], Iterator[Row]]


@dataclass(frozen=True)
class BuiltShards:
    """The shards of one split in order, their files and their sums."""

    row_type: type
    shards: list[Shard]
    paths: list[str]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def counts(self) -> Counts:
        sums = Counts(sum(shard.truncated for shard in self.shards))
        for shard in self.shards:
            sums.dropped.update(shard.dropped)
            sums.parallel.update(shard.parallel)
            sums.columns.update(shard.columns)
        return sums

    def join(self, path: str) -> dict[str, Any]:
        """Write the rows of all shards to one file; returns its entry in the manifest."""
        written = join_files(self.paths, path, self.row_type)
        return {**asdict(written), **self.counts.as_json()}


@dataclass(frozen=True)
class _Job:
    plan: SplitPlan
    begin: int
    end: int
    path: str


def shard_ranges(raw_rows: int) -> list[tuple[int, int]]:
    """The raw rows of each shard: all ranges but the last have one length."""
    length = min(_MOST_ROWS, max(_LEAST_ROWS, math.ceil(raw_rows / _SHARDS)))
    return [(begin, min(begin + length, raw_rows)) for begin in range(0, raw_rows, length)]


def build_shards(folder: str, plans: Sequence[SplitPlan], num_workers: int | None, log: Log) -> dict[str, BuiltShards]:
    """Make every missing shard of every split, in `workers.worker_count` processes; a terminal shows the progress."""
    make_shards_folder(folder)
    wanted = [
        _Job(plan, begin, end, shard_path(folder, plan.name, begin, end))
        for plan in plans
        for begin, end in shard_ranges(plan.raw_rows)
    ]
    done = {job.path: shard for job in wanted if (shard := finished_shard(job.path)) is not None}
    keep_shards(folder, done)
    if done:
        log(f"data: {len(done)} of {len(wanted)} shards were finished by a build that was stopped")
    done |= _make([job for job in wanted if job.path not in done], num_workers, list(done.values()))
    built = {}
    for plan in plans:
        paths = [job.path for job in wanted if job.plan is plan]
        built[plan.name] = BuiltShards(plan.row_type, [done[path] for path in paths], paths)
    return built


def _make(jobs: list[_Job], num_workers: int | None, found: Sequence[Shard]) -> Iterator[tuple[str, Shard]]:
    """The shards of the jobs as they finish; the progress bar begins after the rows of the shards that were found."""
    rows_found = sum(shard.end - shard.begin for shard in found)
    rows = sum(job.end - job.begin for job in jobs)
    tokens = 0
    with progress_bar(rows_found + rows, "data", is_main_rank=True, unit="row", on_terminal_only=True) as bar:
        bar.update(rows_found)
        bar.initial = rows_found  # so that the rate is that of this build
        for number, answer in run_jobs(
            len(jobs), lambda number: asdict(_build_shard(jobs[number])), worker_count(num_workers, rows)
        ):
            shard = Shard(**answer)
            yield jobs[number].path, shard
            tokens += shard.tokens
            rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(shard.end - shard.begin)


def _build_shard(job: _Job) -> Shard:
    """Write a shard under another name first: a file with the right name is whole."""
    counts = Counts()
    with SplitWriter(job.path + ".part", job.plan.row_type) as writer:
        for row in job.plan.make(job.begin, job.end, counts):
            writer.append(row)
    shard = Shard(job.plan.name, job.begin, job.end, **asdict(writer.written), **counts.as_json())
    finish_shard(job.path, job.path + ".part", shard)
    return shard
