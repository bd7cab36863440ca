"""Rollout engines, one file each, and the table of their names."""

from __future__ import annotations

from training.step3_ppo.rollout.base import RolloutEngine
from training.step3_ppo.rollout.hf import TransformersRollout

ENGINES: dict[str, type[RolloutEngine]] = {"hf": TransformersRollout}
