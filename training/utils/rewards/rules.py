"""The tables of rules by name. Cheap to import: `--help` lists the names.

A rule is `fn(prompts, responses, **columns) -> list[float]`: texts in, one number per response out. Each column is a
list of the same length: `ground_truth`, `data_source` and any other column of the dataset's rows (see `calling`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from training.utils.rewards.calling import Rule
from training.utils.rewards.embedded import embedded_reward
from training.utils.rewards.exact_match import exact_match_reward
from training.utils.rewards.gsm8k import gsm8k_reward
from training.utils.rewards.length import length_rule
from training.utils.rewards.math_answer import math_rule
from training.utils.rewards.regex import regex_rule
from training.utils.rewards.think_format import format_reward


class RuleFlags(Protocol):
    """The flags that rules are made from."""

    reward_regex: str | None
    reward_length_characters: int | None


RULES: dict[str, Rule] = {
    "embedded": embedded_reward,
    "gsm8k": gsm8k_reward,
    "exact_match": exact_match_reward,
    "format": format_reward,
}
# Rules that need a flag or a package.
MADE_RULES: dict[str, Callable[[RuleFlags], Rule]] = {
    "regex": lambda flags: regex_rule(flags.reward_regex),
    "length": lambda flags: length_rule(flags.reward_length_characters),
    "math": lambda flags: math_rule(),
}
RULE_NAMES = (*RULES, *MADE_RULES)


def rule_named(name: str, flags: RuleFlags) -> Rule:
    """Return the rule `name`, one of RULE_NAMES; ThreestepError if its flag or package is missing."""
    return RULES[name] if name in RULES else MADE_RULES[name](flags)
