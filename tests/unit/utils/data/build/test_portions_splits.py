"""Splits are disjoint, covering, and decided by numbers alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import parse_data_split
from training.utils.data.build.portions import (
    carve_eval,
    pick_rows,
    share_rows,
    shuffled_order,
    split_indices,
)

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
    # 10 rows by 2, 4, 4: quotas 2, 4, 4. 7 rows by 1, 1, 1: 2 1/3 each, the one row left to the first. 8
    # rows by 1, 5, 5: 0.727, 3.636, 3.636: floors 0, 3, 3, the two left to remainders .727 and .636
    # (first).
    assert share_rows(10, [2, 4, 4]) == [2, 4, 4]
    assert share_rows(7, [1, 1, 1]) == [3, 2, 2]
    assert share_rows(8, [1, 5, 5]) == [1, 4, 3]
    assert share_rows(0, [1, 5, 5]) == [0, 0, 0]


def test_a_split_never_changes_between_releases():
    # Written down once: users' phases must not shift under them.
    assert split_indices(12, "2,4,4", 1234, 1).tolist() == FROZEN_PHASE_1
    assert carve_eval(12, 0.25, 1234)[1].tolist() == FROZEN_EVAL


FROZEN_PHASE_1 = [7, 11]
FROZEN_EVAL = [1, 3, 8]


def test_the_same_rows_in_another_process_and_at_any_world_size():
    program = (
        "from training.utils.data.build.portions import split_indices;print(split_indices(200, '2,4,4', 7, 2).tolist())"
    )
    expected = str(split_indices(200, "2,4,4", 7, 2).tolist())
    for rank, world_size, hash_seed in (("0", "1", "1"), ("3", "4", "2")):
        environment = {"RANK": rank, "WORLD_SIZE": world_size, "PYTHONHASHSEED": hash_seed}
        got = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert got.stdout.strip() == expected


def test_another_seed_is_another_split():
    assert split_indices(100, "2,4,4", 1, 1).tolist() != split_indices(100, "2,4,4", 2, 1).tolist()


def test_rows_that_serve_few_phases_go_to_those():
    # 6 rows for phases 1 and 3 (weights 2 and 4: two and four of them), 3 rows for phase 2 alone: all three.
    served = [(1, 3)] * 6 + [(2,)] * 3
    parts = phases_of(9, "2,4,4", 5, served)
    assert [len(part) for part in parts] == [2, 3, 4]
    assert parts[1].tolist() == [6, 7, 8]
    assert sorted(np.concatenate(parts).tolist()) == list(range(9))


def test_a_row_whose_only_phase_has_no_share_goes_nowhere():
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
    assert [len(rows) for rows in pick_rows([np.arange(5)], None, 1)] == [5]
    assert [len(rows) for rows in pick_rows([np.arange(5)], 9, 1)] == [5]


def test_shuffled_order_is_a_permutation():
    assert sorted(shuffled_order(50, 1).tolist()) == list(range(50))
    assert shuffled_order(50, 1).tolist() != shuffled_order(50, 2).tolist()


@pytest.mark.parametrize("text", ["2,4", "2,4,4,1", "", "a,b,c", "2,-1,4", "nan,1,1", "1/0,1,1", "2 4 4"])
def test_what_is_no_split_is_named(text):
    with pytest.raises(ThreestepError, match="--data_split expects three numbers") as caught:
        parse_data_split(text)
    assert f"'{text}'" in str(caught.value)


def test_a_split_of_zeros_is_named():
    with pytest.raises(ThreestepError, match="at least one share above 0, got '0,0,0'"):
        parse_data_split("0,0,0")


def test_decimals_share_exactly():
    parts = phases_of(10, "0.2,0.4,0.4", 1)
    assert [len(part) for part in parts] == [2, 4, 4]
    assert [part.tolist() for part in parts] == [part.tolist() for part in phases_of(10, "2, 4, 4", 1)]
