"""Reports of a build: counts of raw rows, and of the rows that they became."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

Log = Callable[[str], None]
_KINDS = ("dropped", "noted", "parallel", "columns", "ends", "inside")


@dataclass(frozen=True)
class SplitReport:
    """Counts of the raw rows of one split by their outcome; its entry in the manifest has the same names.

    rows: those that remain. truncated: those that were cut. dropped: those that were dropped, by reason.
    noted: rows that were read otherwise than their dataset class may mean, by kind.
    parallel: of a form of responses, rows that have it, and those that were to and are left in one piece, by kind;
        counted as they are read, before any is dropped for another reason.
    columns: in phase 3, how many of the remaining rows carry each column to rewards and samples.
    ends: in phases 1 and 2, how many responses to learn end with each token; inside: how often special tokens stand
        before the end of one. Responses that were cut are in neither.
    duplicates: rows that remain and repeat an earlier one; None of a build that did not count them.
    """

    rows: int
    tokens: int
    truncated: int
    dropped: dict[str, int]
    noted: dict[str, int]
    parallel: dict[str, int]
    columns: dict[str, int]
    ends: dict[str, int]
    inside: dict[str, int]
    duplicates: int | None = None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> SplitReport:
        """The report in a split's entry in the manifest."""
        return cls(**{field.name: entry[field.name] for field in fields(cls) if field.name in entry})


@dataclass(frozen=True)
class BuildReport:
    """The reports of both splits, and whether they were in the cache."""

    train: SplitReport
    eval: SplitReport
    resumed: bool

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
        f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.truncated:,} truncated{noted}, "
        + (f"parallel thinking: {counts}, " if counts else "")
        + (f"dropped: {dropped}" if dropped else "none dropped")
    )


@dataclass
class Counts:
    """Counts that grow while rows are made (see `SplitReport`)."""

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
