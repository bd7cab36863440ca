"""Two runs: the first step that differs by their digests, and its place by records of that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threestep.plugins.audit.bisect.compare import Comparison, compare
from threestep.plugins.audit.bisect.digest_files import (
    RunDigests,
    StepKey,
    causes_of_rounding,
    environments_that_differ,
    settings_that_differ,
)
from threestep.plugins.audit.bisect.records import WEIGHTS, Located, TracedRecord, locate, read_layers
from threestep.plugins.audit.bisect.rerun import Rerun, Start, rerun
from threestep.plugins.audit.recording.files import read_record
from training.utils.base.errors import ThreestepError


@dataclass(frozen=True)
class Bisection:
    """settings: flags that differ. located: in the records, as the data flow; None if nothing was run again. key: of
    the step that was recorded. began: where the runs were taken up. notes: what a reader must know of this. records: of
    the step, in both."""

    comparison: Comparison
    settings: Mapping[str, tuple[Any, Any]]
    located: Sequence[Located] | None = None
    key: StepKey | None = None
    began: int = 0
    notes: tuple[str, ...] = ()
    records: tuple[Path, ...] = ()


_NOTHING = Comparison((), None, {}, ())


def bisect(a: RunDigests, b: RunDigests, work: Path | None, starts: Sequence[Start]) -> Bisection:
    """Compare two runs. work: the folder in which both are run again; None: their digests alone are compared. starts:
    of the programs of each."""
    comparison = compare(a, b, causes_of_rounding(a, b))
    settings = settings_that_differ(a, b)
    first = comparison.first
    if first is None or work is None:
        return Bisection(comparison, settings)
    if not comparison.steps:
        return Bisection(comparison, settings, notes=("the runs have no step in common",))
    # What differs at the beginning is seen in the first step.
    place = comparison.steps.index(first.key) if first.key != (0, 0) else 0
    runs = [(a, work / "a", starts[0]), (b, work / "b", starts[1])]
    found = _located(runs, comparison.steps[place], first.bound)
    # Digests have the layers of every few steps: what the optimizer did is first seen in the step after.
    while place and found.located and found.located[0].part == WEIGHTS:
        key = comparison.steps[place - 1]
        if all("weights" in run.steps[key] for run in (a, b)):
            break  # they were equal after that step
        earlier, place = _located(runs, key, first.bound), place - 1
        if not earlier.located:
            break
        found = earlier
    return replace(found, comparison=comparison, settings=settings)


def _located(runs: Sequence[tuple[RunDigests, Path, Start]], key: StepKey, bound: float) -> Bisection:
    """Run both again up to a step, and compare their records of it."""
    again = [rerun(run, key, folder, start) for run, folder, start in runs]
    notes = [
        f"{run.folder}, rerun from {_from(each.began)}, does not reproduce step {key[0]:,} ({differing}): "
        f"{_why(run, each, side)}"
        for (run, _, _), each, side in zip(runs, again, "ab", strict=True)
        if (differing := _not_repeated(run.steps[key], each.line))
    ]
    located = locate(_read(again[0]), _read(again[1]), bound)
    began, records = min(each.began for each in again), tuple(each.folder for each in again)
    return Bisection(_NOTHING, {}, located, key, began, tuple(notes), records)


def _read(found: Rerun) -> TracedRecord:
    if not (found.folder / "record.json").is_file():
        raise ThreestepError(
            f"{found.folder} has no record of the step, because a record cannot hold its rows (parallel paths, or "
            "conversations with forks); remove --trust_run to compare only the digests"
        )
    record = read_record(found.folder)
    return TracedRecord(record, read_layers(found.folder, record.head.ranks))


def _from(step: int) -> str:
    return f"the checkpoint of step {step:,}" if step else "the start"


def _not_repeated(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first quantity that the second run of a step did not repeat; "" if it repeated all."""
    for group in ("hashes", "floats", "gradients", "weights"):
        for name, value in before.get(group, {}).items():
            if now.get(group, {}).get(name) != value:
                return str(name) if group in ("hashes", "floats") else f"{group} of {name}"
    return ""


def _why(run: RunDigests, again: Rerun, side: str) -> str:
    """Return the reasons why a run may not repeat itself. side: a or b."""
    differing = environments_that_differ(run.environment, again.environment)
    if not differing:
        code = f"its code (pass a checkout with --code_{side}) or " if "commit" not in run.environment else ""
        return f"{code}its machine differs, or some of its operations are not deterministic"
    words = ", ".join(f"{name} {before}, now {now}".strip() for name, (before, now) in differing.items())
    flags = [
        *([f"pass a checkout with --code_{side}"] if {"commit", "threestep"} & differing.keys() else []),
        *([f"pass an interpreter with --python_{side}"] if differing.keys() - {"commit", "threestep", ""} else []),
    ]
    return f"it ran with {words}" + (f"; {' and '.join(flags)}" if flags else "")
