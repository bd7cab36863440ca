"""The line that says how many rows --data_split leaves to a step."""

from __future__ import annotations

import pytest

from tests.support.pair_rows import Own
from training.utils.data.build.build import build_phase
from training.utils.data.build.portions import divide_rows, open_sources, share_sentence
from training.utils.data.file_dataset import FileDataset


def said(phase, data):
    sources = open_sources(phase, data, 1)
    return share_sentence(phase, data.split, divide_rows(phase, data.split, sources, 1).described)


def rows(count):
    return [{"prompt": f"Human: {i}? Assistant:", "chosen": " yes", "rejected": " no"} for i in range(count)]


def test_a_fifth_of_the_rows_is_said_in_the_first_line(flags, tiny_tokenizer, monkeypatch):
    """600 rows, 60 held out, a fifth of 540."""
    lines: list[str] = []
    data = flags(rows(600))
    build_phase(1, data, tiny_tokenizer, 1, log=lines.append)
    assert lines[0] == ("data: 108 of 600 rows are step 1's share (--data_split 2,4,4); --data_split 1,0,0 takes all")
    lines.clear()
    # also from the cache, for which the rows are not read again
    monkeypatch.setattr(FileDataset, "get_train_data", lambda self: pytest.fail("the rows were read"))
    build_phase(1, data, tiny_tokenizer, 1, log=lines.append)
    assert lines[0].startswith("data: 108 of 600 rows are step 1's share ") and "from the cache" in lines[1]


def test_step_3_hands_other_columns_to_rewards(flags, tiny_tokenizer):
    for phase, others in ((1, "; not read: 'solution'"), (3, "; for rewards: 'level', 'solution'")):
        lines: list[str] = []
        more = [{**row, "solution": "x", "level": 3} for row in rows(40)]
        build_phase(phase, flags(more), tiny_tokenizer, 1, log=lines.append)
        (line,) = [line for line in lines if "read as preference because of its columns" in line]
        assert line.endswith(f" 'rejected'{others}"), line


@pytest.mark.parametrize(
    ("phase", "given", "sentence"),
    [
        (2, {}, "data: 15 of 40 rows are step 2's share (--data_split 2,4,4); --data_split 0,1,0 takes all"),
        (3, {"data_split": "1,1,2"}, "data: 18 of 40 rows are step 3's share (--data_split 1,1,2); --data_split 0,0,1"),
        (3, {"data_split": "0,0,5"}, None),
        (1, {"data_split": "0,1,1"}, None),  # an error of its own says so
        (1, {"eval_fraction": 0.0}, "data: 8 of 40 rows are step 1's share "),
    ],
)
def test_other_splits(flags, phase, given, sentence):
    found = said(phase, flags(rows(40), **given))
    assert (found is None) == (sentence is None)
    assert found is None or found.startswith(sentence)


def test_datasets_of_step_1_alone_and_classes_that_deal_their_rows_are_left_out(own, flags):
    whole = flags(rows(40))
    also = flags(rows(40), sft_only_data_path=whole.source.data_path)
    assert said(1, also) == said(1, whole)
    assert said(1, own(get_phases=lambda self, sample: (1,))) is None


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
        "data: step 1 trains on 5 of 60 rows; 6 held out, 43 for other steps by --data_split 2,4,4, 6 beyond "
        "--max_train_rows 5"
    )


def test_rows_that_a_class_deals_to_other_steps(own, tiny_tokenizer):
    """The split shares those that may serve several."""
    phases = {"phases": (1,)}, {"phases": (2,)}, {"phases": (1, 2)}
    given = [{**Own.rows[0], **phases[place % 3]} for place in range(30)]
    data = own(rows=given, get_phases=lambda self, sample: sample["phases"], eval_fraction=0.0, data_split="1,1,0")
    _, line = trains_on(1, data, tiny_tokenizer)
    words = "15 of 30 rows; 14 of these repeat an earlier one; 15 for other steps by their dataset's class"
    assert line == f"data: step 1 trains on {words}"
