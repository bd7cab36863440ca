"""Advantage estimators, one file each, and the table of their names."""

from __future__ import annotations

from training.step3_ppo.advantages.gae import gae

ESTIMATORS = {"gae": gae}
