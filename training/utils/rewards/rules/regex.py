"""Presence of a pattern in the response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.rewards.calling.calling import Rule


def regex_rule(pattern: str | None) -> Rule:
    """Return the rule that gives 1.0 if Python's `re.search` finds `pattern` in the response, else 0.0."""
    if pattern is None:
        raise ThreestepError("the reward 'regex' expects --reward_regex, got none; give a pattern")
    searched = re.compile(pattern)

    def regex_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [float(searched.search(response) is not None) for response in responses]

    return regex_reward
