"""The files of the benchmarks in their published forms, and the sentences for others."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from threestep.plugins.evaluation.reward_benchmarks.reading import Question, counts_that_differ, read_questions
from training.utils.base.errors import ThreestepError

BEST = {
    "id": "7", "subset": "Math", "prompt": "1 + 1?", "chosen": ["2"], "rejected": ["3", "4", "5"], "num_correct": 1,
    "num_incorrect": 3, "total_completions": 4, "models": ["a", "b", "c", "d"], "additional_metadata": None,
}  # fmt: skip
TIED = {**BEST, "id": "tied:4", "subset": "Ties", "chosen": ["red", "blue"], "num_correct": 2, "total_completions": 5}
PAIR = {"id": 30, "subset": "donotanswer", "prompt": "How?", "chosen": "No.", "chosen_model": "a", "rejected": "So."}


def saved(tmp_path, *rows) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"jsonl:{path}"]


def test_the_published_forms(tmp_path):
    assert read_questions("rewardbench2", saved(tmp_path, BEST, TIED)) == [
        Question("7", "Math", "1 + 1?", ("2", "3", "4", "5")),
        Question("tied:4", "Ties", "1 + 1?", ("red", "blue", "3", "4", "5"), 2),
    ]
    pq.write_table(pa.Table.from_pylist([PAIR]), tmp_path / "filtered.parquet")
    found = read_questions("rewardbench", [str(tmp_path / "filtered.parquet")])
    assert found == [Question("30", "donotanswer", "How?", ("No.", "So."))]
    assert counts_that_differ("rewardbench", found) == [
        "subset donotanswer has 1 rows, and the published one (split `filtered`) has 136"
    ]
    assert counts_that_differ("rewardbench2", found) == []


@pytest.mark.parametrize(
    ("benchmark", "row", "sentence"),
    [
        ("rewardbench2", PAIR, "row 1: expected 'chosen' to be a list of texts, as in RewardBench 2, got 'No.'; of"),
        ("rewardbench", BEST, "row 1: expected 'chosen' to be text, got "),
        ("rewardbench", {"prompt": "x"}, "row 1: expected a column 'chosen', got .*prompt"),
        ("rewardbench2", {**BEST, "num_correct": 2}, "row 1: num_correct is 2, and its lists have 1 responses"),
        ("rewardbench2", {**BEST, "total_completions": 5}, "total_completions is 5, and its lists have 4 responses"),
        (
            "rewardbench2",
            {**BEST, "chosen": ["2", "3"], "num_correct": 2, "total_completions": 5},
            "expected one right",
        ),
        ("rewardbench2", {**TIED, "id": "4"}, "expected an id ref:N or tied:N in the subset Ties, got '4'"),
        (
            "rewardbench2",
            {**TIED, "chosen": ["a"], "num_correct": 1, "total_completions": 4},
            "expected two right resp",
        ),
        ("rewardbench2", {**BEST, "rejected": []}, "expected 'rejected' to be a list of texts"),
    ],
)
def test_other_rows_are_refused(tmp_path, benchmark, row, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        read_questions(benchmark, saved(tmp_path, row))


@pytest.mark.parametrize("name", ["hub:allenai/reward-bench-2", "embedded"])
def test_files_on_disk_are_expected(name):
    with pytest.raises(ThreestepError, match="--data_path expects the benchmark's files on disk, such as parquet:FILE"):
        read_questions("rewardbench2", [name])


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ThreestepError, match="has no rows|is empty"):
        read_questions("rewardbench2", saved(tmp_path))
