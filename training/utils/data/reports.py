"""What became of the raw rows: counts, reports of what was built, and the error where none is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.utils.data.arguments import DataArguments
from training.utils.data.phases import PHASE_NAMES


@dataclass(frozen=True)
class SplitReport:
    """What became of the raw rows of one split: how many were kept, cut, and left out for which reason.

    parallel, of `--parallel_thinking`: rows `with blocks`, and rows `malformed and causal`, kept in one piece; counted
    as they are read, before any is left out for another reason. columns, of phase 3: the names that the kept rows
    carry to rewards and samples, and how many carry each.
    """

    rows: int
    tokens: int
    truncated: int
    dropped: dict[str, int] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildReport:
    """The reports of both splits, and whether the cache had them."""

    train: SplitReport
    eval: SplitReport
    resumed: bool

    @property
    def sentence(self) -> str:
        """One line for a log: what was kept, cut and left out."""
        return "; ".join(split_sentence(name, split) for name, split in (("train", self.train), ("eval", self.eval)))


def split_sentence(name: str, split: SplitReport) -> str:
    """What was kept, cut and left out of one split."""
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(split.dropped.items()))
    found = ", ".join(f"{count:,} {kind}" for kind, count in split.parallel.items())
    return (
        f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {split.truncated:,} truncated, "
        + (f"dropped: {left_out}" if left_out else "none dropped")
        + (f", parallel thinking: {found}" if found else "")
    )


@dataclass
class Counts:
    """Grows while rows are made: how many were cut, how many left out for which reason, how many have parallel
    paths, and how many carry which column (see `SplitReport`)."""

    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    parallel: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        sums = {name: dict(getattr(self, name)) for name in ("dropped", "parallel", "columns")}
        return {"truncated": self.truncated, **sums}


def nothing_left(phase: int, data: DataArguments, sources: Sequence[str], offered: int, counts: Counts) -> str:
    """Why a phase has no training rows though its sources, by name, offered `offered` of them."""
    names = ", ".join(f"'{name}'" for name in sources)
    start = f"phase {phase} ({PHASE_NAMES[phase]}) has no training rows: "
    if offered == 0:
        return start + (
            f"data_split {data.data_split} gives it none of the rows of {names}; raise its share or use more data"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items()))
    hint = ""
    if "no_rejected" in counts.dropped:
        hint = "; a pair needs a rejected response (of files, --rejected_column names it)"
    elif "malformed_parallel" in counts.dropped:
        hint = f"; the tags of parallel thinking are {' '.join(data.parallel_tags)} (parallel_tags)"
    elif set(counts.dropped) & {"too_long", "prompt_too_long", "response_cut_to_nothing"}:
        flag = "max_prompt_seq_len" if phase == 3 else "max_seq_len"
        hint = f"; raise {flag} or change the truncation"
    return start + f"all {offered} rows of {names} were dropped ({reasons}){hint}"
