"""Splits built a shard at a time, by several processes, and joined; counts of their raw rows.

A shard is the result of a fixed range of raw rows. A killed build leaves its finished shards, and the next build of the
same thing uses those whose checksum still fits. The ranges depend only on the number of raw rows, and joining cuts the
rows into new batches, so the result has the same bytes for any number of workers or shards.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from training.utils.base.console import LogPace, counted
from training.utils.contracts.rows import STORED_MEDIA
from training.utils.data.cache.cache import finish_shard, finished_shard, keep_shards, media_path, shard_path
from training.utils.data.cache.workers import run_jobs, worker_count
from training.utils.data.rows.dataset import join_files, media_keys, write_rows
from training.utils.data.rows.media_store import GrowingStore, MediaWriter, copy_media
from training.utils.run.progress import ShownFigure, progress_bar, show

if TYPE_CHECKING:
    from training.utils.contracts.rows import Row
    from training.utils.data.cache.cache import Log

# Enough shards to keep 64 cores busy to the end, not too many files, and enough texts for a call of the tokenizer.
_SHARDS = 256
_LEAST_ROWS, _MOST_ROWS = 512, 8192
_PACE = LogPace(seconds=10.0, waits=True)  # of lines in a log that is a file
_KINDS = ("dropped", "noted", "parallel", "columns", "ends", "inside")


@dataclass
class Counts:
    """Counts of raw rows by their outcome, which grow while rows are made.

    truncated: rows that were cut. dropped: rows that were dropped, by reason.
    noted: rows that were read otherwise than their dataset class may mean, by kind.
    parallel: of a form of responses, rows that have it, and those that were to and are left in one piece, by kind;
        counted as they are read, before any is dropped for another reason.
    columns: in phase 3, how many of the remaining rows carry each column to rewards and samples.
    ends: in phases 1 and 2, how many responses to learn end with each token; inside: how often special tokens stand
        before the end of one. Responses that were cut are in neither.
    """

    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    parallel: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)

    def add(self, entry: dict[str, Any]) -> None:
        """Add the counts of a shard, as `as_json` gave them."""
        self.truncated += entry["truncated"]
        for name in _KINDS:
            getattr(self, name).update(entry[name])

    def as_json(self) -> dict[str, Any]:
        return {"truncated": self.truncated, **{name: dict(getattr(self, name)) for name in _KINDS}}


@dataclass
class SplitReport(Counts):
    """The counts of one split, and the rows that remain; its entry in the manifest has the same names.

    duplicates: rows that remain and repeat an earlier one; None of a build that did not count them.
    """

    rows: int = 0
    tokens: int = 0
    duplicates: int | None = None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> SplitReport:
        """The report in a split's entry in the manifest."""
        return cls(**{field.name: entry[field.name] for field in fields(cls) if field.name in entry})


@dataclass(frozen=True)
class BuildReport:
    """The reports of both splits, and whether they were read from the cache."""

    train: SplitReport
    eval: SplitReport
    from_cache: bool

    @property
    def stops(self) -> tuple[list[str], list[str]]:
        """The tokens that end responses to learn, the most frequent first, and the special tokens that stand before the
        end of one."""
        ends = sorted(self.train.ends, key=lambda token: -self.train.ends[token])
        return ends, sorted(self.train.inside)

    @property
    def sentence(self) -> str:
        """One line for a log: the rows kept, cut and dropped."""
        return "; ".join(split_sentence(name, split) for name, split in (("train", self.train), ("eval", self.eval)))


def split_sentence(name: str, split: SplitReport) -> str:
    """One split: the rows kept and cut, and last the rows dropped: what follows `dropped` reads as a reason."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(split.dropped.items()))
    noted = "".join(f", {count:,} {kind_of_row}" for kind_of_row, count in sorted(split.noted.items()))
    counts = ", ".join(f"{count:,} {kind}" for kind, count in split.parallel.items())
    return (
        f"{name}: {counted(split.rows, 'row')}, {split.tokens:,} tokens, {split.truncated:,} truncated{noted}, "
        + (f"parallel thinking: {counts}, " if counts else "")
        + (f"dropped: {dropped}" if dropped else "none dropped")
    )


@dataclass(frozen=True)
class SplitPlan:
    """One split: `make(begin, end, counts, store)` yields rows of raw rows begin .. end - 1 in any process, counts
    them, and stores their media."""

    name: str
    row_type: type[Row]
    raw_rows: int
    make: Callable[[int, int, Counts, GrowingStore], Iterator[Row]]


@dataclass(frozen=True)
class BuiltShards:
    """The files of one split's shards in order, and the sums of their entries."""

    row_type: type[Row]
    paths: list[str]
    rows: int
    tokens: int
    counts: Counts


def join_splits(folder: str, built: Mapping[str, BuiltShards]) -> dict[str, Any]:
    """Write the rows of each split to one file, and the media of all to one; returns their part of the manifest."""
    splits = {}
    with closing(MediaWriter(os.path.join(folder, f"{STORED_MEDIA}.arrow"))) as media:
        for key, shards in built.items():
            new_keys = {
                path: copy_media(media_path(path), media_keys(path), media)
                for path in shards.paths
                if os.path.exists(media_path(path))
            }
            written = join_files(shards.paths, os.path.join(folder, f"{key}.arrow"), shards.row_type, new_keys)
            splits[key] = {**asdict(written), **shards.counts.as_json()}
        aside = media.finish()
    return {"splits": splits, **({STORED_MEDIA: {"file": f"{STORED_MEDIA}.arrow", **aside}} if aside else {})}


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
    """Make every missing shard of every split, in `workers.worker_count` processes; a bar, or lines of a log,
    show the progress."""
    wanted = [
        _Job(plan, begin, end, shard_path(folder, plan.name, begin, end))
        for plan in plans
        for begin, end in shard_ranges(plan.raw_rows)
    ]
    done = {job.path: entry for job in wanted if (entry := finished_shard(job.path)) is not None}
    keep_shards(folder, done)
    if done:
        log(f"data: reusing {len(done)} of {len(wanted)} shards from an interrupted build")
    done |= _make([job for job in wanted if job.path not in done], num_workers, sum(plan.raw_rows for plan in plans))
    built = {}
    for plan in plans:
        paths = [job.path for job in wanted if job.plan is plan]
        counts = Counts()
        for path in paths:
            counts.add(done[path])
        rows, tokens = (sum(done[path][name] for path in paths) for name in ("rows", "tokens"))
        built[plan.name] = BuiltShards(plan.row_type, paths, rows, tokens, counts)
    return built


def _make(jobs: list[_Job], num_workers: int | None, all_rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries of the jobs' shards as they finish; the progress bar begins after the rows of the shards that exist."""
    rows = sum(job.end - job.begin for job in jobs)
    tokens, begun = 0, time.monotonic()
    with progress_bar(all_rows, "data", is_main_rank=True, unit="row", done=all_rows - rows, pace=_PACE) as bar:
        for number, entry in run_jobs(
            len(jobs), lambda number: _build_shard(jobs[number]), worker_count(num_workers, rows)
        ):
            job = jobs[number]
            yield job.path, entry
            tokens += entry["tokens"]
            done = bar.n - bar.initial + job.end - job.begin
            seconds = max(time.monotonic() - begun, 1e-9)
            rate = (tokens / seconds, "tokens/s") if sys.stderr.isatty() else (done / seconds, "rows/s")
            show(bar, ShownFigure("", rate[0], ",.0f", rate[1], is_mean=False), steps=job.end - job.begin)


def _build_shard(job: _Job) -> dict[str, Any]:
    """Write a shard under another name first: a file with the right name is whole."""
    counts, media = Counts(), MediaWriter(media_path(job.path) + ".part")
    with closing(media):
        made = job.plan.make(job.begin, job.end, counts, media)
        written = write_rows(job.path + ".part", job.plan.row_type, made)
        entry = {**asdict(written), **counts.as_json()}
        if (aside := media.finish()) is not None:
            entry[STORED_MEDIA] = aside
    finish_shard(job.path, job.path + ".part", entry)
    return entry
