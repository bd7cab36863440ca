"""Closeness of the response to a target length.

A bounded form of LCPO-Exact (Aggarwal and Welleck 2025, "L1", equation 1), which subtracts alpha * |target - length|.
Lengths are in characters because rules see text. For tokens, use `--overlong_buffer_tokens`, `--missing_eos_penalty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.rewards.calling.calling import Rule


def length_rule(target_characters: int | None) -> Rule:
    """Return the rule max(0, 1 - |characters - target| / target): 1 at the target length, 0 for an empty response and
    from twice the target on."""
    if target_characters is None:
        raise ThreestepError(
            "the reward 'length' expects a target as --reward_length_characters, got none; give a number"
        )
    target = target_characters

    def length_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(response) - target) / target) for response in responses]

    return length_reward
