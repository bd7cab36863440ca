"""The datasets of a run, and the rows that each split of a phase gets. Knows nothing of tokens or files.

The division is random by the seed alone: it is the same on every machine and at any world size. The generator is
numpy's legacy RandomState, whose stream numpy promises never to change.

Row ids number the rows of all sources in the order of the flags (a source's training rows, then its evaluation rows),
so an id means the same row in every phase with the same `data_path`, and training and evaluation rows have different
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.credentials import redacted
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user
from training.utils.contracts.rows import PHASES
from training.utils.data.arguments import NO_DATA, DataArguments, SplitArguments, parse_data_split, whole_split
from training.utils.data.file_dataset import create_raw_dataset
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.flags.flags import AUTO

if TYPE_CHECKING:
    from training.utils.data.cache.shards import SplitReport

# Streams for different permutations: rows held out for evaluation, rows divided between phases, rows picked.
_CARVE, _SHARE, _PICK = 1, 2, 3


@dataclass(frozen=True)
class DataSource:
    """One entry of `data_path`, or of `sft_only_data_path`, whose `data_split` gives everything to phase 1.

    name: without credentials.
    keeps_answers: of conversations that end with a question; as texts, earlier versions left these out.
    """

    name: str
    raw: PromptRawDataset
    data_split: str
    sft_only: bool = False
    keeps_answers: bool = True


@dataclass(frozen=True, eq=False)
class Portion:
    """One split's part of one source: `indices` (int64, ascending) into `rows`; row i has the id `first_row_id` + i."""

    source: DataSource
    rows: Sequence[Any]
    indices: np.ndarray
    first_row_id: int


@dataclass(frozen=True)
class Portions:
    """The portions of both splits, and the manifest's entries for the sources."""

    train: list[Portion]
    eval: list[Portion]
    described: list[dict[str, Any]]


def open_sources(phase: int, data: DataArguments, seed: int) -> list[DataSource]:
    """The sources of a phase in the order of the flags; raises ThreestepError where there are none."""

    def opened(name: str, split: str, sft_only: bool = False) -> DataSource:
        return DataSource(redacted(name), create_raw_dataset(name, flags, data.cache.cache_dir, seed), split, sft_only)

    flags = data.source
    sources = [opened(name, data.split.data_split) for name in flags.data_path]
    if phase == 1:
        sources += [opened(name, whole_split(1), sft_only=True) for name in flags.sft_only_data_path]
    if not sources:
        raise ThreestepError(NO_DATA)
    return sources


def divide_rows(phase: int, flags: SplitArguments, sources: Sequence[DataSource], seed: int) -> Portions:
    """Divide the rows of all sources; raises ThreestepError for a source that cannot serve the phase."""
    shared = Portions([], [], [])
    first_row_id = 0
    for source in sources:
        train, own_eval = call_user(source.raw.get_train_data), call_user(source.raw.get_eval_data)
        if len(train) == 0:
            raise ThreestepError(f"dataset '{source.name}' is empty: it has no training rows")
        source.raw.check_phase(phase)
        own_rows = 0 if own_eval is None else len(own_eval)
        if own_eval is None or own_rows == 0:
            trained, eval_indices = carve_eval(len(train), flags.eval_fraction, seed)
            eval_rows, eval_first_id = train, first_row_id
        else:
            trained, eval_indices = np.arange(len(train)), np.arange(own_rows)
            eval_rows, eval_first_id = own_eval, first_row_id + len(train)
        phases_of_trained = _phases_of(source, train, trained)
        phases_of_eval = _phases_of(source, eval_rows, eval_indices)
        if phases_of_eval is not None:
            eval_indices = eval_indices[[phase in phases for phases in phases_of_eval]]
        split = whole_split(phase) if source.data_split == AUTO else source.data_split
        mine = trained[split_indices(len(trained), split, seed, phase, phases_of_rows=phases_of_trained)]
        shared.train.append(Portion(source, train, mine, first_row_id))
        shared.eval.append(Portion(source, eval_rows, eval_indices, eval_first_id))
        recognition = source.raw.get_recognition()
        shared.described.append(
            {
                "name": source.name,
                "first_row_id": first_row_id,
                "training_rows": len(train),
                "own_evaluation_rows": own_rows,
                "evaluation_rows_carved": own_rows == 0,
                "shared_by_data_split": not (source.sft_only or _chooses_phases(source)),
                "recognised": None if recognition is None else recognition.as_json(),
            }
        )
        first_row_id += len(train) + own_rows
    return Portions(
        _at_most(shared.train, flags.max_train_rows, seed),
        _at_most(shared.eval, flags.max_eval_rows, seed),
        shared.described,
    )


def rows_sentence(phase: int, flags: SplitArguments, described: Sequence[dict[str, Any]], train: SplitReport) -> str:
    """A sentence on how many rows a step trains on, and on the reasons why it trains on no more.

    described: the manifest's `sources`, so that rows in the cache need no look at the data. Sources whose class deals
    its rows to phases are not shared by --data_split. train: the outcome of the training rows.
    """
    weights = parse_data_split(flags.data_split)
    total = held_out = others = 0
    for source in described:
        rows = able = source["training_rows"]
        if source["evaluation_rows_carved"]:
            able = len(carve_eval(rows, flags.eval_fraction, 0)[0])
        total, held_out = total + rows, held_out + rows - able
        if source["shared_by_data_split"]:
            others += able - share_rows(able, weights)[phase - 1]
    dropped = sum(train.dropped.values())
    most = flags.max_train_rows
    beyond = f"beyond --max_train_rows {most:,}" if most is not None else "left to other steps by their dataset class"
    reasons = {
        "held out": held_out,
        f"left to other steps by --data_split {flags.data_split} ({whole_split(phase)} uses all rows)": others,
        beyond: total - held_out - others - train.rows - dropped,
        f"dropped ({', '.join(f'{count:,} {why}' for why, count in sorted(train.dropped.items()))})": dropped,
    }
    words = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    repeats = f"; {train.duplicates:,} of these repeat an earlier one" if train.duplicates else ""
    return f"data: step {phase} trains on {train.rows:,} of {total:,} rows{repeats}" + (f"; {words}" if words else "")


def part_of(portions: Sequence[Portion], begin: int, end: int) -> list[Portion]:
    """The rows begin .. end - 1 of several portions, numbered consecutively."""
    parts = []
    for portion in portions:
        taken = portion.indices[max(begin, 0) : max(end, 0)]
        if len(taken):
            parts.append(replace(portion, indices=taken))
        begin, end = begin - len(portion.indices), end - len(portion.indices)
    return parts


def _at_most(portions: Sequence[Portion], most: int | None, seed: int) -> list[Portion]:
    picked = pick_rows([portion.indices for portion in portions], most, seed)
    return [replace(portion, indices=indices) for portion, indices in zip(portions, picked, strict=True)]


def _phases_of(source: DataSource, rows: Sequence[Any], indices: np.ndarray) -> list[tuple[int, ...]] | None:
    """`get_phases` of each row; None where the class does not override it: every row serves all phases."""
    if not _chooses_phases(source):
        return None
    return [tuple(source.raw.get_phases(rows[int(index)])) for index in indices]


def _chooses_phases(source: DataSource) -> bool:
    return type(source.raw).get_phases is not PromptRawDataset.get_phases


def share_rows(rows: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Divide `rows` by weight with the largest remainder: the counts add up and a weight of 0 gets nothing.

    Worked example, 10 rows by weights 1, 1, 1: quotas 3 1/3 each, floors 3, 3, 3; the remaining row goes to the
    largest remainder, the first of equals: 4, 3, 3.
    """
    total = sum(weights)
    if rows == 0 or total == 0:
        return [0] * len(weights)
    quotas = [Fraction(rows) * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: rows - sum(counts)]:
        counts[index] += 1
    return counts


def split_indices(
    rows: int, data_split: str, seed: int, phase: int, *, phases_of_rows: Sequence[tuple[int, ...]] | None = None
) -> np.ndarray:
    """The rows, out of 0 .. rows - 1, that one phase trains on: int64, ascending.

    The results for phases 1, 2, 3 are disjoint and cover every row. `phases_of_rows`: the phases that each row may
    serve (None: all). Rows that may serve the same phases are divided between those by the same weights; a row whose
    phases all have weight 0 is left out.
    """
    weights = parse_data_split(data_split)
    if phases_of_rows is None:
        groups: dict[tuple[int, ...], np.ndarray] = {PHASES: np.arange(rows)}
    else:
        members: dict[tuple[int, ...], list[int]] = {}
        for row, phases in enumerate(phases_of_rows):
            members.setdefault(tuple(sorted(set(phases))), []).append(row)
        groups = {phases: np.array(indices, dtype=np.int64) for phases, indices in sorted(members.items())}
    taken = [np.zeros(0, dtype=np.int64)]
    for phases, indices in groups.items():
        allowed = [weight if p in phases else Fraction(0) for p, weight in zip(PHASES, weights, strict=True)]
        bounds = np.cumsum([0, *share_rows(len(indices), allowed)])
        shuffled = indices[shuffled_order(len(indices), seed, _SHARE)]
        taken.append(shuffled[bounds[phase - 1] : bounds[phase]])
    return np.sort(np.concatenate(taken)).astype(np.int64)


def carve_eval(rows: int, eval_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold rows out for evaluation: (training rows, evaluation rows), int64, ascending, disjoint, covering."""
    count = round(rows * eval_fraction)
    if eval_fraction > 0 and rows >= 2:
        count = min(max(count, 1), rows - 1)  # at least one of each
    shuffled = shuffled_order(rows, seed, _CARVE)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def pick_rows(indices: Sequence[np.ndarray], most: int | None, seed: int) -> list[np.ndarray]:
    """At most `most` rows of several sources, ascending, each keeping its share; by the seed."""
    total = sum(len(rows) for rows in indices)
    if most is None or total <= most:
        return list(indices)
    counts = share_rows(most, [len(rows) for rows in indices])
    return [
        np.sort(rows[shuffled_order(len(rows), seed, _PICK)[:count]])
        for rows, count in zip(indices, counts, strict=True)
    ]


def shuffled_order(rows: int, seed: int, stream: int = _PICK) -> np.ndarray:
    """A permutation of 0 .. rows - 1 decided by the seed; another for each `stream`."""
    return np.random.RandomState([seed % 2**32, stream]).permutation(rows).astype(np.int64)
