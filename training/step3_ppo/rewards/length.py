"""Is the response as long as it should be?

A bounded form of LCPO-Exact (Aggarwal and Welleck 2025, "L1", equation 1), which takes off alpha * |target - length|.
Lengths are characters: a rule sees texts. For tokens there are `--overlong_buffer_tokens` and `--missing_eos_penalty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.step3_ppo.rewards.calling import Rule
from training.utils.run.errors import ThreestepError


def length_rule(target_characters: int | None) -> Rule:
    """Return the rule max(0, 1 - |characters - target| / target): 1 at the target, 0 for nothing and from twice the
    target on."""
    if target_characters is None:
        raise ThreestepError(
            "the reward 'length' compares with --reward_length_characters, and none is given; give a number"
        )
    target = target_characters

    def length_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(response) - target) / target) for response in responses]

    return length_reward
