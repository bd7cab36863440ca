"""`--reward` and the names in it."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.rules import format_reward, gsm8k_reward
from training.utils.rewards.weighted import (
    MODEL_ALONE,
    named_rewards,
    reads_model,
    rule_named,
)  # fmt: skip


def named(reward: str, **flags):
    mistakes = Mistakes()
    found = named_rewards(ScoringArguments(reward=reward, **flags), mistakes)
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
    (alone,) = named(f"{own}:my_reward:2.5")
    assert (alone.name, alone.weight) == ("my_reward", 2.5)


def test_the_default_is_the_reward_model():
    assert named(ScoringArguments().reward) == MODEL_ALONE.named and reads_model(MODEL_ALONE.named)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("gsm8:1", r"^--reward expects model, gsm8k, .* or a function as FILE.py:NAME, got 'gsm8'; did you mean 'g"),
        ("gsm8k:high", "got 'gsm8k:high'"),
        ("model,,gsm8k", "got ''"),
        ("", "^--reward expects model, .*, got ''$"),
        ("gsm8k:nan", "got 'gsm8k:nan'"),
        ("gsm8k,gsm8k:2", "^--reward expects each reward once and functions of different names, got 'gsm8k' twice in "),
        ("none.py:my_reward:2", "^--reward expects an existing file, got 'none.py'$"),
        ("regex", "^the reward 'regex' expects --reward_regex, got none"),
        ("length:0.1", "^the reward 'length' expects a target as --reward_length_characters, got none"),
    ],
)
def test_what_is_no_reward(reward, said):
    with pytest.raises(ThreestepError, match=said):
        named(reward)


def test_rules_that_flags_make():
    (regex,) = named("regex", reward_regex="b+")
    (length,) = named("length", reward_length_characters=2)
    assert regex.rule([""], ["abba"]) == [1.0] and length.rule([""], ["abc"]) == [0.5]


@pytest.mark.needs_plugin("embedded")
def test_a_checker_is_a_rule_too():
    assert rule_named("format", ScoringArguments(), "--checker") is format_reward
    with pytest.raises(ThreestepError, match="^--checker expects gsm8k, .*, embedded, .*, got 'model'"):
        rule_named("model", ScoringArguments(), "--checker")
