"""Mathematical answers by math-verify, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules.math_answer import answers_match, math_rule
from training.utils.rewards.table import RULES


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ThreestepError) as caught:
        RULES["math"](ScoringArguments())
    said = "the reward 'math' needs the package math-verify, which is not installed; run: pip install math-verify"
    assert str(caught.value) == said


def test_a_truth_is_read_first_as_it_stands_then_as_tex(monkeypatch):
    """A stand-in that reads what stands between dollar signs and the number behind the last blank."""
    stand_in = ModuleType("math_verify")
    stand_in.parse = lambda text: [text.strip("$").split()[-1]] if text.strip("$") and "x" not in text[:1] else []
    stand_in.verify = lambda truth, answer: truth == answer
    monkeypatch.setitem(sys.modules, "math_verify", stand_in)
    responses, truths = ["it is 18", "it is 17", "it is x", "so 1"], ["18", 18, "x", None]
    assert answers_match(responses, truths) == [1.0, 0.0, 1.0, 0.0]


def test_with_the_package():
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install math-verify")
    responses = [r"so $\frac{2}{4}$", r"so \boxed{0.5}", "The answer is 18.", "The answer is 17.", "nothing", "1"]
    truths = [r"\frac{1}{2}", "1/2", 18, "18", "18", None]
    assert math_rule()(["p"] * 6, responses, ground_truth=truths) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
