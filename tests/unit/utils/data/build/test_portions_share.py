"""The line that says how many rows a step trains on, and how many --data_split leaves to others."""

from __future__ import annotations

import pytest

from tests.support.pair_rows import Own
from training.utils.data.build.build import build_phase
from training.utils.data.file_dataset import FileDataset


def rows(count):
    return [{"prompt": f"Human: {i}? Assistant:", "chosen": " yes", "rejected": " no"} for i in range(count)]


def test_rows_in_the_cache_are_counted_without_a_look_at_the_data(flags, tiny_tokenizer, monkeypatch):
    """600 rows, 60 held out, a fifth of 540."""
    said = []
    for _ in range(2):
        built, line = trains_on(1, flags(rows(600)), tiny_tokenizer)
        said.append(line)
        monkeypatch.setattr(FileDataset, "get_train_data", lambda self: pytest.fail("the rows were read"))
    assert built.report.resumed and said[0] == said[1]
    assert said[0] == (
        "data: step 1 trains on 108 of 600 rows; 60 held out, 432 for other steps by --data_split 2,4,4 "
        "(1,0,0 takes all)"
    )


def test_step_3_hands_other_columns_to_rewards(flags, tiny_tokenizer):
    for phase, others in ((1, "; not read: 'solution'"), (3, "; for rewards: 'level', 'solution'")):
        lines: list[str] = []
        more = [{**row, "solution": "x", "level": 3} for row in rows(40)]
        build_phase(phase, flags(more), tiny_tokenizer, 1, log=lines.append)
        (line,) = [line for line in lines if "read as preference because of its columns" in line]
        assert line.endswith(f" 'rejected'{others}"), line


@pytest.mark.parametrize(
    ("phase", "given", "others"),
    [
        (2, {}, "21 for other steps by --data_split 2,4,4 (0,1,0 takes all)"),
        (3, {"data_split": "1,1,2"}, "18 for other steps by --data_split 1,1,2 (0,0,1 takes all)"),
        (3, {"data_split": "0,0,5"}, None),
        (1, {"eval_fraction": 0.0}, "32 for other steps by --data_split 2,4,4 (1,0,0 takes all)"),
    ],
)
def test_other_splits(flags, tiny_tokenizer, phase, given, others):
    _, line = trains_on(phase, flags(rows(40), **given), tiny_tokenizer)
    assert (others in line) if others else ("other steps" not in line)


def test_datasets_of_step_1_alone_and_classes_that_deal_their_rows_are_left_out(own, flags, tiny_tokenizer):
    whole = flags(rows(40))
    also = flags(rows(40), sft_only_data_path=whole.source.data_path)
    for data in (whole, also):
        assert "29 for other steps by --data_split" in trains_on(1, data, tiny_tokenizer)[1]
    assert "by --data_split" not in trains_on(1, own(get_phases=lambda self, sample: (1,)), tiny_tokenizer)[1]


def trains_on(phase, data, tokenizer):
    lines: list[str] = []
    built = build_phase(phase, data, tokenizer, 1, log=lines.append)
    (line,) = (line for line in lines if " trains on " in line)
    return built, line


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_step_alone_trains_on_every_row_that_is_not_held_out(flags, tiny_tokenizer, phase):
    """The same rows, and the same folder in the cache, as where the split says so."""
    built, line = trains_on(phase, flags(rows(60), data_split="auto"), tiny_tokenizer)
    assert len(built.train) == 54 and line == f"data: step {phase} trains on 54 of 60 rows; 6 held out"
    named = build_phase(phase, flags(rows(60), data_split=("1,0,0", "0,1,0", "0,0,1")[phase - 1]), tiny_tokenizer, 1)
    assert named.report.resumed and [row.row_id for row in named.train] == [row.row_id for row in built.train]


def test_every_row_has_its_reason(flags, tiny_tokenizer):
    given = [*rows(30), *rows(10), {"prompt": "Human: a Assistant:", "chosen": None, "rejected": " no"}]
    _, line = trains_on(1, flags(given, data_split="auto", eval_fraction=0.0), tiny_tokenizer)
    assert line == "data: step 1 trains on 40 of 41 rows; 10 of these repeat an earlier one; 1 dropped (1 no_chosen)"
    _, line = trains_on(1, flags(rows(60), max_train_rows=5), tiny_tokenizer)
    assert line == (
        "data: step 1 trains on 5 of 60 rows; 6 held out, 43 for other steps by --data_split 2,4,4 (1,0,0 takes all), "
        "6 beyond --max_train_rows 5"
    )


def test_rows_that_a_class_deals_to_other_steps(own, tiny_tokenizer):
    """The split shares those that may serve several."""
    phases = {"phases": (1,)}, {"phases": (2,)}, {"phases": (1, 2)}
    given = [{**Own.rows[0], **phases[place % 3]} for place in range(30)]
    data = own(rows=given, get_phases=lambda self, sample: sample["phases"], eval_fraction=0.0, data_split="1,1,0")
    _, line = trains_on(1, data, tiny_tokenizer)
    words = "15 of 30 rows; 14 of these repeat an earlier one; 15 for other steps by their dataset's class"
    assert line == f"data: step 1 trains on {words}"
