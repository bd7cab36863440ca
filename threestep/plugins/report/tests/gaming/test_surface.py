"""Surface features of responses, counted by hand."""

from __future__ import annotations

import pytest

from threestep.plugins.report.gaming.surface import FEATURES, features_of, lines, marks, repetition


def test_features_of_a_text():
    assert marks("**Yes**, no") == pytest.approx(5 / 10)  # ** ** and the comma, of ten signs that are no space
    assert marks("") == 0.0
    assert lines("one\ntwo\n") == 2.0 and lines("") == 1.0
    assert repetition("cat cat cat cat") == pytest.approx(2 / 3)  # three pairs, of which one is new
    assert repetition("a b a b") == pytest.approx(1 / 3) and repetition("a") == 0.0


def test_features_of_samples():
    samples = [
        {"prompt_index": 0, "response": " owl", "response_tokens": 2},
        {"prompt_index": 0, "response": " owl", "response_tokens": 2},  # of the same prompt
        {"prompt_index": 1, "response": "first turn", "last_turn": "cat", "response_tokens": 3},
        {"prompt_index": 2, "response": "cat ", "response_tokens": 4},
    ]
    found = features_of(samples)
    assert found.keys() == FEATURES.keys()
    assert found["length"] == [2.0, 2.0, 3.0, 4.0]
    assert found["sameness"] == [0.0, 0.0, 1.0, 1.0]
