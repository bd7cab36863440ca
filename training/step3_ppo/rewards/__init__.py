"""Rewards computed by a rule, one file each, and the table of their names.

A rule is `fn(prompts, responses, **columns) -> list[float]`: texts in, one number a response out. The columns are lists
as long as those: `ground_truth`, `data_source` and whatever else the dataset's rows carry (see `calling`).
"""

from __future__ import annotations

from training.step3_ppo.rewards.calling import Rule
from training.step3_ppo.rewards.embedded import embedded_reward
from training.step3_ppo.rewards.gsm8k import gsm8k_reward

RULES: dict[str, Rule] = {"embedded": embedded_reward, "gsm8k": gsm8k_reward}
