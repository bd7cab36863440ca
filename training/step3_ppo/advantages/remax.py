"""ReMax: REINFORCE with the greedy response's score as the baseline. Pure tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, rewards_to_go

if TYPE_CHECKING:
    import torch


def remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, None]:
    """Return advantages_BR: G_t - the score of the greedy response to the same prompt, with G_t = r_t + G_{t+1}.

    Li et al. 2024 (arXiv:2310.10505). The baseline is the score alone, without KL.
    """
    if inputs.greedy_scores_B is None:
        raise AssertionError("remax needs the scores of greedy responses")
    return rewards_to_go(inputs, 1.0) - inputs.on_tokens(inputs.greedy_scores_B), None
