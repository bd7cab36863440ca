"""Rules on the text: the embedded task's checker, equality, GSM8K's final answer, DeepSeek-R1's tags, a pattern, a
length."""

from __future__ import annotations

import math

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules import (
    exact_match_reward,
    format_reward,
    gsm8k_reward,
    length_rule,
    regex_rule,
)
from training.utils.rewards.table import RULES


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        (" apple fig\n", "apple fig", 1.0),
        ("apple  fig", "apple fig", 0.0),
        ("Apple fig", "apple fig", 0.0),
        ("18", 18, 1.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
        ("4", 4.0, 1.0),
        ("4.0", 4, 1.0),
        ("4.0", 4.0, 1.0),
        ("4", "4", 1.0),
        ("4.0", "4", 0.0),  # texts are compared as texts
        ("5", 4.0, 0.0),
        ("0.5", 0.5, 1.0),
        ("four", 4, 0.0),
        ("True", True, 1.0),
        ("1", True, 0.0),
        ("b", [None, "b"], 1.0),
        ("None", None, None),
        ("", None, None),
        ("nan", math.nan, None),
        ("b", {"target": "b"}, None),
        ("", "", 1.0),
    ],
)
def test_equality(response, truth, reward):
    assert exact_match_reward(["p"], [response], ground_truth=[truth], level=[1]) == [reward]
    assert RULES["exact_match"](ScoringArguments()) is exact_match_reward


@pytest.mark.parametrize(
    ("response", "reference", "reward"),
    [
        ("She has 5.\n#### 18", "18", 1.0),
        ("#### 18", 18, 1.0),
        ("#### 18.", "18", 1.0),
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
        ("", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### -$3", "-3", 1.0),
        ("#### \N{MINUS SIGN}3", "-3", 1.0),
        # References as files hold them: a whole solution, boxed, with units, a number of JSON.
        ("#### 72", "He sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72", 1.0),
        ("#### 24", "He sold 48/2 = <<48/2=24>>24, so 48+24 = 72.\n#### 72", 0.0),
        ("#### 1200", "It is 1,000 and 200.\n#### 1,200", 1.0),
        ("#### 42", r"First 6 and 7, so \boxed{42}.", 1.0),
        ("#### 42", r"so \boxed{\$42}", 1.0),
        ("#### 42", "42.0", 1.0),
        ("#### 42", 42.0, 1.0),
        ("#### 1800", "$1,800", 1.0),
        ("#### 1800", "1,800.00 dollars", 1.0),
        ("#### 1800", "A: 1800", 1.0),
        ("#### 1000", "1e3", 1.0),
        ("#### 18", ["17", 18], 1.0),
        ("#### 18", None, None),
        ("#### 18", "unknown", None),
        ("#### 18", "between 17 and 18", None),
        ("#### 18", math.nan, None),
        ("#### 18", {"answer": 18}, None),
        ("#### 1", True, None),
    ],
)
def test_answers(response, reference, reward):
    assert gsm8k_reward(["p"], [response], ground_truth=[reference], data_source=["gsm8k"]) == [reward]


def test_one_number_a_response():
    assert gsm8k_reward(["p"] * 3, ["#### 1", "#### 2", "3"], ground_truth=["1", "1", "3"]) == [1.0, 0.0, 0.0]
    assert RULES["gsm8k"](ScoringArguments()) is gsm8k_reward


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
        ("", 0.0),
    ],
)
def test_the_form(response, reward):
    assert format_reward(["p"], [response], ground_truth=[None]) == [reward]
    assert RULES["format"](ScoringArguments()) is format_reward


def test_a_prompt_that_opened_the_first_block():
    responses = ["a</think> <answer>4</answer>", "<think>a</think> <answer>4</answer>"]
    assert format_reward(["... <think>\n"] * 2, responses) == [1.0, 0.0]


def test_the_pattern_is_searched_for():
    rule = regex_rule(r"answer is (\d+)$")
    responses = ["the answer is 12", "answer is 12!", "the answer is", "Answer is 3"]
    assert rule(["p"] * 4, responses, ground_truth=[None] * 4, pattern=["x"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_no_pattern():
    with pytest.raises(ThreestepError, match="expects --reward_regex, got none; give a pattern"):
        regex_rule(None)


def test_by_hand():
    # 1 - |n - 8| / 8: at 8 nothing is missing, at 6 and 10 a quarter, at 0 and 16 all; beyond it stays 0.
    responses = ["x" * characters for characters in (8, 6, 10, 0, 16, 40)]
    assert length_rule(8)(["p"] * 6, responses, ground_truth=[None] * 6) == [1.0, 0.75, 0.75, 0.0, 0.0, 0.0]


def test_characters_are_no_bytes():
    assert length_rule(2)(["p"], ["äß"]) == [1.0]


def test_no_target():
    with pytest.raises(ThreestepError, match="expects a target as --reward_length_characters, got none; give a n"):
        length_rule(None)
