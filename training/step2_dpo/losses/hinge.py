"""The hinge loss of SLiC-HF."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss

if TYPE_CHECKING:
    import torch


def of_margins(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The hinge of SLiC-HF (Zhao et al. 2023), on log-ratios as in RSO (Liu et al. 2023)."""
    return (1.0 - objective.beta * margins_Q).relu()


LOSS = PreferenceLoss("is SLiC's (Zhao et al. 2023)", of_margins)
