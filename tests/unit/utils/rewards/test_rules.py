"""Rules on the text: equality, GSM8K's final answer, DeepSeek-R1's tags; mathematical answers by math-verify."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules import (
    answers_match,
    exact_match_reward,
    format_reward,
    gsm8k_reward,
    math_rule,
)
from training.utils.rewards.table import RULES

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (" apple fig\n", "apple fig", 1.0),
        ("apple  fig", "apple fig", 0.0),
        ("Apple fig", "apple fig", 0.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
        ("4", 4.0, 1.0),
        ("4.0", 4, 1.0),
        (" 2.50 ", 2.5, 1.0),
        ("2,5", 2.5, 0.0),
        ("4", "4", 1.0),
        ("4.0", "4", 0.0),  # texts are compared as texts
        ("5", 4.0, 0.0),
        ("four", 4, 0.0),
        ("inf", math.inf, 1.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
        ("b", [None, "b"], 1.0),
        ("None", None, None),
        ("nan", math.nan, None),
        ("b", {"target": "b"}, None),
        ("", "", 1.0),
    ],
)
def test_equality(response, truth, reward):
    assert exact_match_reward(["p"], [response], ground_truth=[truth], level=[1]) == [reward]


SOLUTION = "He sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72"


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("She has 5.\n#### 18", "18", 1.0),
        ("#### 18.", 18, 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### $18", "18", 1.0),
        ("#### 1,800", "1800", 1.0),
        ("#### 1800", "1,800", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 0.5", ".5", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### 180", "18", 0.0),
        ("#### 18.5", "18", 0.0),
        ("18", "18", 0.0),  # no mark, no answer
        ("#### 17 #### 18", "18", 1.0),  # the last mark counts
        ("#### 18 #### none", "18", 0.0),
        ("####", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### -$3", "-3", 1.0),
        ("#### \N{MINUS SIGN}3", "-3", 1.0),
        # References as files hold them: a whole solution, boxed, with units, a number of JSON.
        ("#### 72", SOLUTION, 1.0),
        ("#### 24", SOLUTION, 0.0),
        ("#### 1200", "It is 1,000 and 200.\n#### 1,200", 1.0),
        ("#### 42", r"First 6 and 7, so \boxed{42}.", 1.0),
        ("#### 42", r"so \boxed{\$42}", 1.0),
        ("#### -2", r"\boxed{1} then \boxed{-2}", 1.0),
        ("#### 2", r"\boxed{\frac{1}{2}}", None),
        ("#### 42", 42.0, 1.0),
        ("#### 1800", "1,800.00 dollars", 1.0),
        ("#### 50", "50%", 1.0),
        ("#### 1234.5", "\N{EURO SIGN}1,234.50", 1.0),
        ("#### 1800", "A: 1800", 1.0),
        ("#### 1000", "1e3", 1.0),
        ("#### 18", ["17", 18, None], 1.0),
        ("#### 18", None, None),
        ("#### 18", "#### none", None),
        ("#### 18", "inf", None),
        ("#### 18", "between 17 and 18", None),
        ("#### 18", math.nan, None),
        ("#### 18", {"answer": 18}, None),
        ("#### 1", True, None),
    ],
)
def test_gsm8ks_answers(response, reference, reward):
    given = gsm8k_reward(["p"] * 2, [response, "3"], ground_truth=[reference, "3"], data_source=["gsm8k"] * 2)
    assert given == [reward, 0.0]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (" <think></think><answer></answer>\n", 1.0),
        ("<think>1 < 2 <b></think> <answer>x</answer>", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think> <answer>4</answer> done", 0.0),
        ("<answer>4</answer> <think>a</think>", 0.0),
        ("<think>a</think> <answer>4", 0.0),
        ("<think>a <think>b</think> <answer>4</answer>", 0.0),
        ("<think>a</think> <answer>4</answer> <answer>5</answer>", 0.0),
        ("a</think> <answer>4</answer>", 0.0),
    ],
)
def test_the_form_of_tags(response, reward):
    assert format_reward(["p"], [response], ground_truth=[None]) == [reward]


def test_a_prompt_that_opened_the_first_block():
    responses = ["a</think> <answer>4</answer>", "<think>a</think> <answer>4</answer>"]
    assert format_reward(["... <think>\n"] * 2, responses) == [1.0, 0.0]


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = "^the reward 'math' needs the package math-verify, which is not installed; run: pip install math-verify$"
    with pytest.raises(ThreestepError, match=said):
        RULES["math"](ScoringArguments())


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
