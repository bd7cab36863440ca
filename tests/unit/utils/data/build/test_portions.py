"""Splits are disjoint, covering, and decided by numbers alone; how many rows a step trains on, and why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pair_rows import Own
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import parse_data_split
from training.utils.data.build.build import build_phase
from training.utils.data.build.portions import (
    Portion,
    carve_eval,
    part_of,
    pick_rows,
    share_rows,
    shuffled_order,
    split_indices,
)
from training.utils.data.file_dataset import FileDataset

weights = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).filter(any)
seeds = st.integers(0, 2**32 - 1)


def phases_of(rows, data_split, seed, phases_of_rows=None):
    return [split_indices(rows, data_split, seed, phase, phases_of_rows=phases_of_rows) for phase in (1, 2, 3)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), weights, seeds)
def test_phases_are_disjoint_and_cover_every_row(rows, shares, seed):
    parts = phases_of(rows, ",".join(map(str, shares)), seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    for part, share in zip(parts, shares, strict=True):
        assert share > 0 or len(part) == 0
        assert abs(len(part) - rows * share / sum(shares)) < 1


def test_the_split_that_deepspeed_chat_rounds_wrong():
    # DeepSpeed-Chat gives [7474, 0, 3738] rows here: a weight of 0 gets nearly all, phase 2 nothing.
    assert [len(part) for part in phases_of(7475, "0,5,5", 1234)] == [0, 3738, 3737]


def test_largest_remainder_by_hand():
    # 10 rows by 2, 4, 4: quotas 2, 4, 4. 7 rows by 1, 1, 1: 2 1/3 each, the one row left to the first. 8 rows by
    # 1, 5, 5: 0.727, 3.636, 3.636: floors 0, 3, 3, the two left to remainders .727 and .636 (first).
    assert share_rows(10, [2, 4, 4]) == [2, 4, 4]
    assert share_rows(7, [1, 1, 1]) == [3, 2, 2]
    assert share_rows(8, [1, 5, 5]) == [1, 4, 3]
    assert share_rows(0, [1, 5, 5]) == [0, 0, 0]
    decimals = phases_of(10, "0.2,0.4,0.4", 1)
    assert [part.tolist() for part in decimals] == [part.tolist() for part in phases_of(10, "2, 4, 4", 1)]


def test_a_split_never_changes_between_releases():
    """Written down once: users' phases must not shift under them."""
    assert split_indices(12, "2,4,4", 1234, 1).tolist() == [7, 11]
    assert carve_eval(12, 0.25, 1234)[1].tolist() == [1, 3, 8]
    assert split_indices(100, "2,4,4", 1, 1).tolist() != split_indices(100, "2,4,4", 2, 1).tolist()


def test_rows_that_serve_few_phases_go_to_those():
    # 6 rows for phases 1 and 3 (weights 2 and 4: two and four of them), 3 rows for phase 2 alone: all three.
    parts = phases_of(9, "2,4,4", 5, [(1, 3)] * 6 + [(2,)] * 3)
    assert [len(part) for part in parts] == [2, 3, 4] and parts[1].tolist() == [6, 7, 8]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9))
    assert [len(part) for part in phases_of(3, "1,0,1", 5, [(2,)] * 3)] == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.floats(0, 0.99), seeds)
def test_carving_is_disjoint_and_covering(rows, fraction, seed):
    train, held_out = carve_eval(rows, fraction, seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(rows))
    if rows >= 2 and fraction > 0:
        assert len(train) >= 1 and len(held_out) >= 1
    if fraction == 0:
        assert len(held_out) == 0


def test_what_is_carved_does_not_depend_on_the_split_nor_shape_it():
    # Two independent shuffles: the rows held out are no prefix of any phase's order.
    train, held_out = carve_eval(1000, 0.1, 3)
    phase_1 = split_indices(1000, "1,9,0", 3, 1)
    assert 0 < len(set(held_out.tolist()) & set(phase_1.tolist())) < 40


def test_pick_rows_keeps_each_sources_share():
    picked = pick_rows([np.arange(60), np.arange(30)], 9, seed=1)
    assert [len(rows) for rows in picked] == [6, 3]
    assert all(rows.tolist() == sorted(set(rows.tolist())) for rows in picked)
    assert [len(rows) for most in (None, 9) for rows in pick_rows([np.arange(5)], most, 1)] == [5, 5]
    assert sorted(shuffled_order(50, 1).tolist()) == list(range(50))
    assert shuffled_order(50, 1).tolist() != shuffled_order(50, 2).tolist()


@pytest.mark.parametrize("text", ["2,4", "2,4,4,1", "", "a,b,c", "2,-1,4", "nan,1,1", "1/0,1,1", "2 4 4", "0,0,0"])
def test_what_is_no_split_is_named(text):
    said = "at least one share above 0" if text == "0,0,0" else "--data_split expects three numbers"
    with pytest.raises(ThreestepError, match=f"{said}.*'{text}'"):
        parse_data_split(text)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 5, {"a": [1, 3, 5], "c": [0, 9]}),
        (1, 4, {"a": [3, 5], "c": [0]}),
        (3, 5, {"c": [0, 9]}),
        (4, 9, {"c": [9]}),
        (0, 1, {"a": [1]}),
        (2, 2, {}),
    ],
)
def test_a_range_of_all_rows_as_the_portions_it_touches(begin, end, expected):
    portions = [
        Portion("a", range(10), np.array([1, 3, 5]), 0),
        Portion("b", range(10), np.array([], np.int64), 10),
        Portion("c", range(10), np.array([0, 9]), 20),
    ]
    parts = part_of(portions, begin, end)
    assert {part.source: part.indices.tolist() for part in parts} == expected
    assert all(part.first_row_id == {"a": 0, "c": 20}[part.source] for part in parts)


# --- the line that says how many rows a step trains on


def rows(count):
    return [{"prompt": f"Human: {i}? Assistant:", "chosen": " yes", "rejected": " no"} for i in range(count)]


def trains_on(phase, data, tokenizer):
    lines: list[str] = []
    built = build_phase(phase, data, tokenizer, 1, log=lines.append)
    (line,) = (line for line in lines if " trains on " in line)
    return built, line.removeprefix(f"data: step {phase} trains on ")


def test_rows_in_the_cache_are_counted_without_a_look_at_the_data(flags, tiny_tokenizer, monkeypatch):
    """600 rows, 60 held out, a fifth of 540."""
    said = []
    for _ in range(2):
        built, line = trains_on(1, flags(rows(600)), tiny_tokenizer)
        said.append(line)
        monkeypatch.setattr(FileDataset, "get_train_data", lambda self: pytest.fail("the rows were read"))
    assert built.report.from_cache and said[0] == said[1]
    assert (
        said[0] == "108 of 600 rows; 60 held out, 432 left to other steps by --data_split 2,4,4 (1,0,0 uses all rows)"
    )


def test_step_3_hands_other_columns_to_rewards(flags, tiny_tokenizer):
    for phase, others in ((1, "; not read: 'solution'"), (3, "; for rewards: 'level', 'solution'")):
        lines: list[str] = []
        more = [{**row, "solution": "x", "level": 3} for row in rows(40)]
        build_phase(phase, flags(more), tiny_tokenizer, 1, log=lines.append)
        (line,) = [line for line in lines if "read as preference because of its columns" in line]
        assert line.endswith(f" 'rejected'{others}"), line


ODD = {"prompt": "Human: a Assistant:", "chosen": None, "rejected": " no"}


@pytest.mark.parametrize(
    ("phase", "given_rows", "given", "said"),
    [
        (2, rows(40), {},
         "15 of 40 rows; 4 held out, 21 left to other steps by --data_split 2,4,4 (0,1,0 uses all rows)"),
        (3, rows(40), {"data_split": "1,1,2"},
         "18 of 40 rows; 4 held out, 18 left to other steps by --data_split 1,1,2 (0,0,1 uses all rows)"),
        (3, rows(40), {"data_split": "0,0,5"}, "36 of 40 rows; 4 held out"),
        (1, rows(40), {"eval_fraction": 0.0},
         "8 of 40 rows; 32 left to other steps by --data_split 2,4,4 (1,0,0 uses all rows)"),
        (1, [*rows(30), *rows(10), ODD], {"data_split": "auto", "eval_fraction": 0.0},
         "40 of 41 rows; 10 of these repeat an earlier one; 1 dropped (1 no_chosen)"),
        (1, rows(60), {"max_train_rows": 5, "max_eval_rows": 2},
         "5 of 60 rows; 6 held out, 43 left to other steps by --data_split 2,4,4 (1,0,0 uses all rows), 6 "
         "beyond --max_train_rows 5"),
    ],
)  # fmt: skip
def test_every_row_has_its_reason(flags, tiny_tokenizer, phase, given_rows, given, said):
    built, line = trains_on(phase, flags(given_rows, **given), tiny_tokenizer)
    assert line == said and len(built.eval) <= given.get("max_eval_rows", 4)


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_step_alone_trains_on_every_row_that_is_not_held_out(flags, tiny_tokenizer, phase):
    """The same rows, and the same folder in the cache, as where the split says so."""
    built, line = trains_on(phase, flags(rows(60), data_split="auto"), tiny_tokenizer)
    assert len(built.train) == 54 and line == "54 of 60 rows; 6 held out"
    named = build_phase(phase, flags(rows(60), data_split=("1,0,0", "0,1,0", "0,0,1")[phase - 1]), tiny_tokenizer, 1)
    assert named.report.from_cache and [row.row_id for row in named.train] == [row.row_id for row in built.train]


def test_datasets_of_step_1_alone_and_classes_that_deal_their_rows_are_left_out(own, flags, tiny_tokenizer):
    whole = flags(rows(40))
    also = flags(rows(40), sft_only_data_path=whole.source.data_path)
    for data in (whole, also):
        assert "29 left to other steps by --data_split" in trains_on(1, data, tiny_tokenizer)[1]
    assert "by --data_split" not in trains_on(1, own(get_phases=lambda self, sample: (1,)), tiny_tokenizer)[1]


def test_rows_that_a_class_deals_to_other_steps(own, tiny_tokenizer):
    """The split shares those that may serve several."""
    phases = {"phases": (1,)}, {"phases": (2,)}, {"phases": (1, 2)}
    given = [{**Own.rows[0], **phases[place % 3]} for place in range(30)]
    data = own(rows=given, get_phases=lambda self, sample: sample["phases"], eval_fraction=0.0, data_split="1,1,0")
    built, line = trains_on(1, data, tiny_tokenizer)
    assert line == "15 of 30 rows; 14 of these repeat an earlier one; 15 left to other steps by their dataset class"
    assert all(row.row_id % 3 != 1 for row in built.train)
