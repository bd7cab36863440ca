"""REINFORCE++ and its form with a group baseline. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, rewards_to_go

if TYPE_CHECKING:
    import torch


def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR before whitening: G_t = r_t + gamma G_{t+1}.

    Hu et al. 2025 (arXiv:2501.03262); the caller whitens over the tokens of all ranks, which is the method's baseline.
    """
    return rewards_to_go(inputs, settings.gamma), None


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR before whitening: R - mean of the group, the same on all tokens of a response.

    The same paper's form for several samples a prompt; the caller whitens over the tokens of all ranks. A group of one
    gets 0.
    """
    return inputs.on_tokens(group_centred(inputs.outcomes_B, inputs.group_B)), None
