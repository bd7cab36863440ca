"""Rewards computed by a rule, one file each, and the table of their names.

A rule is `fn(prompts, responses, references) -> list[float]`: texts in, one number a response out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from training.step3_ppo.rewards.embedded import embedded_reward
from training.step3_ppo.rewards.gsm8k import gsm8k_reward

Rule = Callable[[Sequence[str], Sequence[str], Sequence[Any]], list[float]]

RULES: dict[str, Rule] = {"embedded": embedded_reward, "gsm8k": gsm8k_reward}
