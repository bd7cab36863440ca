"""Scaling of groups' advantages: by a deviation of the group, or of all sequences of the rollout. Pure tensors.

B sequences.
"""

from __future__ import annotations

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_std

EPSILON = 1e-6  # as verl's; keeps groups of nearly equal outcomes finite


def scaled(
    advantages_B: torch.Tensor,
    values_B: torch.Tensor,
    inputs: AdvantageInputs,
    settings: AdvantageSettings,
    *,
    usual: str | None = "group",
) -> torch.Tensor:
    """Return advantages / (the standard deviation of `values_B` + 1e-6), with denominator n - 1.

    settings.norm_over, `usual` where that is None: `group`, the sequence's group (Shao et al. 2024); `batch`, the
        sequences of all ranks, which weighs a prompt by how much its outcomes differ (Liu et al. 2025,
        arXiv:2508.08221). With neither, and without `norm_by_std`, advantages stay as they are.
    """
    over = settings.norm_over or usual
    if over is None or not settings.norm_by_std:
        return advantages_B
    if over == "group":
        return advantages_B / (group_std(values_B, inputs.group_B) + EPSILON)
    count = torch.ones_like(values_B).sum()
    count, total, squares = inputs.over_ranks(torch.stack([count, values_B.sum(), values_B.square().sum()])).unbind()
    variance = (squares - total.square() / count) / (count - 1.0).clamp(min=1.0)
    return advantages_B / (variance.clamp(min=0.0).sqrt() + EPSILON)
