"""The checker of the embedded task as a reward. Cheap to import: its name is read before anything loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.rewards.calling import Rule


def logged_name(address: str) -> str:
    """Return the reward's name in the log."""
    return address


def embedded_rule(address: str, name: str, flag: str) -> Rule:
    """Return the rule; its answers are `check`'s."""
    return embedded_reward


def embedded_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return the checker's score from 0 to 1 for each response."""
    from threestep.plugins.embedded.task import check

    return [check(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
