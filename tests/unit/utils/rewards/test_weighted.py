"""The rewards in `--reward`: their names, weights and flags, and one score of several by hand."""

from __future__ import annotations

import math

import pytest
import torch

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.rewards.arguments import Combination, ScoringArguments
from training.utils.rewards.rules import format_reward, gsm8k_reward
from training.utils.rewards.table import RULES
from training.utils.rewards.weighted import MODEL_ALONE, combined, named_rewards, reads_model, rule_named


def named(reward: str, **flags):
    given, mistakes = ScoringArguments(reward=reward, **flags), Mistakes()
    note_mistakes(given, mistakes)
    found = named_rewards(given, mistakes)
    mistakes.raise_if_any()
    return found


def test_names_and_weights(tmp_path):
    own = tmp_path / "my_file.py"
    own.write_text("def my_reward(prompts, responses, **columns):\n    return [0.0] * len(responses)\n")
    found = named(f"gsm8k:1.0, model:0.5,{own}:my_reward,exact_match:-2e-1")
    told = [(reward.name, reward.weight) for reward in found]
    assert told == [("gsm8k", 1.0), ("model", 0.5), ("my_reward", 1.0), ("exact_match", -0.2)]
    assert found[0].rule is gsm8k_reward and found[1].rule is None and found[2].rule([], ["a"]) == [0.0]
    assert reads_model(found) and not reads_model(found[2:])
    (alone,) = named(f" {own}:my_reward:0")
    assert (alone.name, alone.weight) == ("my_reward", 0.0)
    assert named(ScoringArguments().reward) == MODEL_ALONE.named and reads_model(MODEL_ALONE.named)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gsm8:1", r"^--reward expects model, gsm8k, .* or a function as FILE.py:NAME, got 'gsm8'; did you mean 'g"),
        ("gsm8k:high", "got 'gsm8k:high'"),
        ("model,,gsm8k", "got ''"),
        ("", "^--reward expects model, .*, got ''$"),
        ("gsm8k:nan", "got 'gsm8k:nan'"),
        ("gsm8k,gsm8k:2", "^--reward expects each reward once and functions with different names, got 'gsm8k' twice"),
        ("none.py:my_reward:2", "^--reward expects an existing file, got 'none.py'$"),
        ("regex", "^the reward 'regex' needs a pattern; set --reward_regex"),
        ("length:0.1", "^the reward 'length' needs a target; set --reward_length_characters"),
        ({"reward_timeout": 0.0}, "^--reward_timeout expects more than 0, got 0.0"),
        ({"reward_length_characters": 0}, "^--reward_length_characters expects 1 or more, got 0"),
        ({"reward_regex": "a("}, r"^--reward_regex expects a regular expression, got 'a\(': missing \), unterminated"),
        ({"reward_combine": "mean", "reward_deviations": 2.0},
         "--reward_deviations 2 applies only to --reward_combine mean_minus_deviations"),
    ],
)  # fmt: skip
def test_what_is_refused(given, said):
    with pytest.raises(ThreestepError, match=said):
        named(given) if isinstance(given, str) else named("gsm8k", **given)


def test_rules_that_flags_make():
    (regex,) = named("regex", reward_regex=r"answer is (\d+)$", reward_timeout=0.5)
    responses = ["the answer is 12", "answer is 12!", "the answer is", "Answer is 3"]
    assert regex.rule(["p"] * 4, responses, ground_truth=[None] * 4, pattern=["x"] * 4) == [1.0, 0.0, 0.0, 0.0]
    # 1 - |n - 8| / 8: at 8 nothing is missing, at 6 and 10 a quarter, at 0 and 16 all; beyond it stays 0.
    (length,) = named("length", reward_length_characters=8)
    responses = ["ä" * characters for characters in (8, 6, 10, 0, 16, 40)]
    assert length.rule(["p"] * 6, responses, ground_truth=[None] * 6) == [1.0, 0.75, 0.75, 0.0, 0.0, 0.0]


@pytest.mark.needs_plugin("embedded")
def test_a_checker_is_a_rule_too():
    assert rule_named("format", ScoringArguments(), "--checker") is format_reward
    with pytest.raises(ThreestepError, match="^--checker expects gsm8k, .*, embedded, .*, got 'model'"):
        rule_named("model", ScoringArguments(), "--checker")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_an_empty_response(name):
    if name == "math":
        pytest.importorskip("math_verify")
    rule = RULES[name](ScoringArguments(reward_regex="x", reward_length_characters=5))
    given = rule(["Human: Sort: owl fox Assistant:"], [""], ground_truth=["5"], data_source=[None])
    assert given == [0.0]


SCORES = [[1.0, 3.0, math.nan], [2.0, 3.0, math.nan], [6.0, math.nan, math.nan]]  # K rewards of B responses


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", [9.0, 6.0, 0.0]),
        ("mean", [3.0, 3.0, 0.0]),
        ("minimum", [1.0, 3.0, 0.0]),
        # Of 1, 2, 6: deviation sqrt((4 + 1 + 9) / 3).
        ("mean_minus_deviations", [3.0 - 2.0 * math.sqrt(14 / 3), 3.0, 0.0]),
    ],
)
def test_several_in_one_score(kind, expected):
    """What does not apply is no member; a response to which nothing applies scores 0."""
    scores_BK = torch.tensor(SCORES, dtype=torch.float64).T
    found_B = combined(scores_BK, ~scores_BK.isnan(), Combination(kind, 2.0))
    assert found_B.tolist() == pytest.approx(expected, abs=1e-12)
