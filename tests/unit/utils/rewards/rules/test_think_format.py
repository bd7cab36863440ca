"""The tags of DeepSeek-R1."""

from __future__ import annotations

import pytest

from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules.think_format import format_reward
from training.utils.rewards.table import RULES


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
