"""The published files of the benchmarks, read from disk: a prompt and its responses, the right ones first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threestep.plugins.evaluation.reward_benchmarks.scores import MATH_PRM_ROWS, TIED, TIES, WEIGHTS
from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import column_names
from training.utils.data.files.readers import READERS, files_of, open_rows, split_reader

_TIES_ID = re.compile(r"(ref|tied):\d+")


@dataclass(frozen=True)
class Question:
    """A row of a benchmark. responses: of which the first `right` are right."""

    row_id: str
    subset: str
    prompt: str
    responses: tuple[str, ...]
    right: int = 1


def read_questions(benchmark: str, data_path: Sequence[str]) -> list[Question]:
    """Return the rows of the files of --data_path, in their order. ThreestepError for rows of another form."""
    read, questions = FORMS[benchmark], []
    for name in data_path:
        reader = split_reader(name)
        if reader is None or reader[0] not in READERS:
            raise ThreestepError(
                f"--data_path expects the benchmark's files on disk, such as parquet:FILE, got '{name}'; download them "
                "from the hub first"
            )
        rows = open_rows(reader[0], files_of(*reader, "--data_path"), None)
        questions += [read(row, f"{name}, row {place}") for place, row in enumerate(rows, start=1)]
    if not questions:
        raise ThreestepError(f"--data_path {' '.join(data_path)} has no rows; expected the rows of {benchmark}")
    return questions


def counts_that_differ(benchmark: str, questions: Sequence[Question]) -> list[str]:
    """A sentence for each subset of RewardBench whose number of rows differs from the published one."""
    if benchmark != "rewardbench":
        return []
    published = {**WEIGHTS, "math-prm": MATH_PRM_ROWS}
    found = Counter(question.subset for question in questions)
    return [
        f"subset {name} has {found[name]:,} rows, but the published one (split `filtered`) has {count:,}"
        for name, count in published.items()
        if name in found and found[name] != count
    ]


def _pair(row: Mapping[str, Any], where: str) -> Question:
    texts = [_text(row, name, where) for name in ("prompt", "chosen", "rejected", "subset")]
    return Question(str(row.get("id", "")), texts[3], texts[0], (texts[1], texts[2]))


def _best_of(row: Mapping[str, Any], where: str) -> Question:
    prompt, subset = (_text(row, name, where) for name in ("prompt", "subset"))
    right, wrong = (_texts(row, name, where) for name in ("chosen", "rejected"))
    for name, expected in (("num_correct", len(right)), ("total_completions", len(right) + len(wrong))):
        if row.get(name, expected) != expected:
            raise ThreestepError(f"{where}: {name} is {row[name]}, but the row lists {expected}")
    row_id = str(row.get("id", ""))
    if subset.lower() == TIES:
        if not _TIES_ID.fullmatch(row_id):
            raise ThreestepError(
                f"{where}: expected an id of the form ref:N or tied:N in the subset {subset}, got '{row_id}'"
            )
        if row_id.startswith(TIED) and len(right) < 2:
            raise ThreestepError(f"{where}: expected at least two correct responses for {row_id}, got {len(right)}")
    elif len(right) != 1:
        raise ThreestepError(f"{where}: expected one correct response in the subset {subset}, got {len(right)}")
    return Question(row_id, subset, prompt, (*right, *wrong), len(right))


FORMS: dict[str, Callable[[Mapping[str, Any], str], Question]] = {"rewardbench2": _best_of, "rewardbench": _pair}


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    _require(row, name, where)
    if not isinstance(row[name], str):
        raise ThreestepError(f"{where}: expected '{name}' to be a string, got {row[name]!r:.60}")
    return row[name]


def _texts(row: Mapping[str, Any], name: str, where: str) -> list[str]:
    _require(row, name, where)
    value = row[name]
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ThreestepError(
            f"{where}: expected '{name}' to be a list of strings, as in RewardBench 2, got {value!r:.60}; for pairs, "
            "use --benchmark rewardbench"
        )
    return value


def _require(row: Mapping[str, Any], name: str, where: str) -> None:
    if name not in row:
        raise ThreestepError(f"{where}: expected a column '{name}', got {column_names(row)}")
