"""Four tokens of three sequences, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.references.reductions import MISTAKES, REDUCTIONS, Units, counted_sequences

pytestmark = pytest.mark.unit

# Sequences (2 4), (6), (no token that counts); micro-batches: the first two, the third; ranks: the first, the others.
UNITS = Units(
    values_U=np.array([2.0, 4.0, 6.0, 9.0]),
    weights_U=np.array([1.0, 1.0, 1.0, 0.0]),
    sequence_U=np.array([0, 0, 1, 2]),
    micro_U=np.array([0, 0, 1, 1]),
    rank_U=np.array([0, 0, 1, 1]),
    micro_batches=2,
    ranks=2,
    longest=4.0,
    full=3.0,
)


@pytest.mark.parametrize(
    ("name", "right"),
    [("token mean", 4.0), ("sequence mean", 4.5), ("sequence sum", 6.0), ("sequence sum norm", 1.5)],
)
def test_reductions_by_hand(name, right):
    assert REDUCTIONS[name](UNITS) == right
    assert counted_sequences(UNITS) == 2


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("sum over micro-batches", 4.5),
        ("mean over micro-batches", (3.0 + 6.0) / 2),
        ("ranks of their own", (3.0 + 6.0) / 2),
        ("sequences of their means", 4.5),
        ("with those in which no token", 4.5 * 2 / 3),
        ("all tokens alike", 4.0),
        ("sum of each sequence", 6.0),
        ("divided by nothing", 12.0),
        ("one token more", 12.0 / 5),
        ("count of all tokens", 3.0),
        ("partial accumulation divided", 4.5 / 3),
        ("of which this step has fewer", 4.0 / 3),
        ("not divided by the number of micro", 4.0),
        ("micro-batches once more", 4.0),
        ("ranks once more", 2.0),
        ("multiplied by the number of ranks", 8.0),
        ("last micro-batch alone", 6.0),
        ("first rank alone", 3.0),
    ],
)
def test_mistakes_by_hand(words, wrong):
    [mistake] = [compute for sentence, compute in MISTAKES.items() if words in sentence]
    assert mistake(UNITS, REDUCTIONS["token mean"]) == pytest.approx(wrong)


def test_every_mistake_has_a_hand_worked_number():
    assert len(MISTAKES) == 18
