"""Rewards computed by a rule, one file each, and the tables of their names.

A rule is `fn(prompts, responses, **columns) -> list[float]`: texts in, one number a response out. The columns are lists
as long as those: `ground_truth`, `data_source` and whatever else the dataset's rows carry (see `calling`).
"""

from __future__ import annotations

from collections.abc import Callable

from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.rewards.calling import Rule
from training.step3_ppo.rewards.embedded import embedded_reward
from training.step3_ppo.rewards.exact_match import exact_match_reward
from training.step3_ppo.rewards.gsm8k import gsm8k_reward
from training.step3_ppo.rewards.length import length_rule
from training.step3_ppo.rewards.math_answer import math_rule
from training.step3_ppo.rewards.regex import regex_rule
from training.step3_ppo.rewards.think_format import format_reward

RULES: dict[str, Rule] = {
    "embedded": embedded_reward,
    "gsm8k": gsm8k_reward,
    "exact_match": exact_match_reward,
    "format": format_reward,
}
# Rules that are made from flags, or need a package; ThreestepError where that is missing.
MADE_RULES: dict[str, Callable[[RewardArguments], Rule]] = {
    "regex": lambda flags: regex_rule(flags.reward_regex),
    "length": lambda flags: length_rule(flags.reward_length_characters),
    "math": lambda flags: math_rule(),
}
RULE_NAMES = (*RULES, *MADE_RULES)


def rule_named(name: str, flags: RewardArguments) -> Rule:
    """Return the rule of one of RULE_NAMES; ThreestepError where its flag or package is missing."""
    return RULES[name] if name in RULES else MADE_RULES[name](flags)
