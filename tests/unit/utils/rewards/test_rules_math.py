"""Mathematical answers by math-verify, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules import answers_match, math_rule
from training.utils.rewards.table import RULES

ROOT = Path(__file__).parents[4]


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
    assert answers_match(responses, truths) == [1.0, 0.0, 1.0, None]
    truths = [18.0, ["16", "17"], "so 3 + 1\n#### x", {"answer": 1}]
    assert answers_match(responses, truths) == [1.0, 1.0, 1.0, None]


def test_a_script_that_has_no_guard_is_not_run_again(tmp_path):
    """The rule's process is a new one."""
    (tmp_path / "math_verify.py").write_text(
        "def parse(text):\n    return [text]\n\ndef verify(truth, answer):\n    return truth == answer\n"
    )
    (tmp_path / "script.py").write_text(
        "print('begun', flush=True)\n"
        "from training.utils.rewards.rules import math_rule\n"
        "print(math_rule()(['p', 'q'], ['1', '2'], ground_truth=['1', '3']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    own = [sys.executable, str(tmp_path / "script.py")]
    ran = subprocess.run(own, env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("begun\n[1.0, 0.0]\n", 0), ran.stderr


def test_with_the_package():
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install math-verify")
    responses = [r"so $\frac{2}{4}$", r"so \boxed{0.5}", "The answer is 18.", "The answer is 17.", "nothing", "1"]
    truths = [r"\frac{1}{2}", "1/2", 18, "18", "18", None]
    assert math_rule()(["p"] * 6, responses, ground_truth=truths) == [1.0, 1.0, 1.0, 0.0, 0.0, None]
