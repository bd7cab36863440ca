"""The table of rules by name. Cheap to import: `--help` lists the names.

A rule is `fn(prompts, responses, **columns) -> list[float]`: texts in, one number per response out. Each column is a
list of the same length: `ground_truth`, `data_source` and any other column of the dataset's rows (see `calling`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from training.utils.rewards.rules.math_answer import math_rule
from training.utils.rewards.rules.text_rules import (
    embedded_reward,
    exact_match_reward,
    format_reward,
    gsm8k_reward,
    length_rule,
    regex_rule,
)

if TYPE_CHECKING:
    from training.utils.rewards.calling.calling import Rule


class RuleFlags(Protocol):
    """The flags that rules are made from."""

    reward_regex: str | None
    reward_length_characters: int | None
    reward_replay: str | None


# Each makes its rule; ThreestepError if the rule's flag or package is missing.
RULES: dict[str, Callable[[RuleFlags], Rule]] = {
    "embedded": lambda flags: embedded_reward,
    "gsm8k": lambda flags: gsm8k_reward,
    "exact_match": lambda flags: exact_match_reward,
    "format": lambda flags: format_reward,
    "regex": lambda flags: regex_rule(flags.reward_regex),
    "length": lambda flags: length_rule(flags.reward_length_characters),
    "math": lambda flags: math_rule(),
}
