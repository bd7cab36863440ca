"""Sums by name: hashes wrap around and stay exact, floats add up."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.audit.recording import sums
from threestep.plugins.audit.recording.sums import Sums

pytestmark = pytest.mark.unit


def test_the_totals_of_one_rank_are_its_own():
    own = Sums()
    for value in (-1, 2**62, 2**62, 2**62):
        own.add_hashes("b", torch.tensor([value, 1]))
    own.add_hashes("a", torch.tensor(-2))
    own.add_floats("x", torch.tensor([0.5, 2.0]))
    own.add_floats("x", torch.tensor([0.5, -1.0]))
    expected = f"{(-1 + 3 * 2**62) % 2**64:016x}"
    assert own.totals(torch.device("cpu")) == (
        {"a": [f"{2**64 - 2:016x}"], "b": [expected, f"{4:016x}"]},
        {"x": [1.0, 1.0]},
    )
    assert own.own() == ({"b": [expected, f"{4:016x}"], "a": [f"{2**64 - 2:016x}"]}, {"x": [1.0, 1.0]})


def test_the_halves_of_hashes_add_up_over_ranks(monkeypatch):
    monkeypatch.setattr(sums, "summed", lambda values: 3 * values)  # three ranks with the same numbers
    own = Sums()
    own.add_hashes("a", torch.tensor(-5))
    own.add_floats("x", torch.tensor(0.25))
    assert own.totals(torch.device("cpu")) == ({"a": [f"{-15 % 2**64:016x}"]}, {"x": [0.75]})


def test_nothing_has_no_totals():
    assert Sums().totals(torch.device("cpu")) == ({}, {})
