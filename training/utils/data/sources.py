"""The datasets of a run, and which of their rows each split of a phase gets. Knows nothing of tokens or files.

Row ids number the rows of all sources in the order of the flags (a source's training rows, then its own
evaluation rows), so an id means the same row in every phase that has the same `data_path`, and no training
row shares one with an evaluation row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from training.utils.data.arguments import DataArguments
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import create_raw_dataset
from training.utils.data.splits import carve_eval, pick_rows, split_indices
from training.utils.run.errors import ThreestepError

_WHOLE_INTO_PHASE_1 = "1,0,0"


@dataclass(frozen=True)
class Source:
    """One entry of `data_path`, or of `sft_only_data_path`, whose `data_split` is all into phase 1."""

    name: str
    raw: PromptRawDataset
    data_split: str
    sft_only: bool = False


@dataclass(frozen=True, eq=False)
class Portion:
    """What one split takes of one source: `indices` (int64, ascending) into `rows`; row i has the id
    `first_row_id` + i.
    """

    source: Source
    rows: Sequence[Any]
    indices: np.ndarray
    first_row_id: int


@dataclass(frozen=True)
class Portions:
    """The portions of both splits, and what the manifest says of the sources."""

    train: list[Portion]
    eval: list[Portion]
    described: list[dict[str, Any]]


def open_sources(phase: int, data: DataArguments, seed: int) -> list[Source]:
    """The sources of a phase in the order of the flags; raises ThreestepError where there is none."""
    sources = [Source(name, create_raw_dataset(name, data, seed), data.data_split) for name in data.data_path]
    if phase == 1:
        sources += [
            Source(name, create_raw_dataset(name, data, seed), _WHOLE_INTO_PHASE_1, sft_only=True)
            for name in data.sft_only_data_path
        ]
    if not sources:
        raise ThreestepError(f"data_path: phase {phase} has no dataset; name at least one")
    return sources


def choose_rows(phase: int, data: DataArguments, sources: Sequence[Source], seed: int) -> Portions:
    """Share out the rows of all sources; raises ThreestepError for a source that cannot serve the phase."""
    chosen = Portions([], [], [])
    first_row_id = 0
    for source in sources:
        train, own_eval = source.raw.get_train_data(), source.raw.get_eval_data()
        if len(train) == 0:
            raise ThreestepError(f"dataset '{source.name}' is empty: it has no training rows")
        source.raw.check_phase(phase)
        own_rows = 0 if own_eval is None else len(own_eval)
        if own_eval is None or own_rows == 0:
            kept, eval_indices = carve_eval(len(train), data.eval_fraction, seed)
            eval_rows, eval_first_id = train, first_row_id
        else:
            kept, eval_indices = np.arange(len(train)), np.arange(own_rows)
            eval_rows, eval_first_id = own_eval, first_row_id + len(train)
        phases_of_kept = _phases_of(source, train, kept)
        phases_of_eval = _phases_of(source, eval_rows, eval_indices)
        if phases_of_eval is not None:
            eval_indices = eval_indices[[phase in phases for phases in phases_of_eval]]
        mine = kept[split_indices(len(kept), source.data_split, seed, phase, phases_of_kept)]
        chosen.train.append(Portion(source, train, mine, first_row_id))
        chosen.eval.append(Portion(source, eval_rows, eval_indices, eval_first_id))
        chosen.described.append(
            {
                "name": source.name,
                "first_row_id": first_row_id,
                "training_rows": len(train),
                "own_evaluation_rows": own_rows,
                "evaluation_rows_carved": own_rows == 0,
            }
        )
        first_row_id += len(train) + own_rows
    return Portions(
        _at_most(chosen.train, data.max_train_rows, seed, data.pick_rows),
        _at_most(chosen.eval, data.max_eval_rows, seed, data.pick_rows),
        chosen.described,
    )


def part_of(portions: Sequence[Portion], begin: int, end: int) -> list[Portion]:
    """The rows begin .. end - 1 of several portions, numbered through."""
    parts = []
    for portion in portions:
        taken = portion.indices[max(begin, 0) : max(end, 0)]
        if len(taken):
            parts.append(replace(portion, indices=taken))
        begin, end = begin - len(portion.indices), end - len(portion.indices)
    return parts


def _at_most(portions: Sequence[Portion], most: int | None, seed: int, how: str) -> list[Portion]:
    picked = pick_rows([portion.indices for portion in portions], most, seed, first=how == "first")
    return [replace(portion, indices=indices) for portion, indices in zip(portions, picked, strict=True)]


def _phases_of(source: Source, rows: Sequence[Any], indices: np.ndarray) -> list[tuple[int, ...]] | None:
    """What `get_phases` says of each row; None where the class does not override it: every row serves all."""
    if type(source.raw).get_phases is PromptRawDataset.get_phases:
        return None
    return [tuple(source.raw.get_phases(rows[int(index)])) for index in indices]
