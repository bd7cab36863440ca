"""From one score a response to one reward a token. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch


def shaped_rewards(
    scores_B: torch.Tensor, kl_BR: torch.Tensor, response_lengths_B: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Return rewards_BR: the score on each response's last real token, minus kl_coef x KL on every token.

    scores_B: float32. kl_BR: float32, read inside the response only. response_lengths_B: int64 >= 1.
    Stiennon et al. 2020, section 3.4; InstructGPT (Ouyang et al. 2022), equation 2.
    """
    columns_R = torch.arange(kl_BR.shape[1], device=kl_BR.device)
    inside_BR = columns_R < response_lengths_B.unsqueeze(1)
    rewards_BR = torch.where(inside_BR, -kl_coef * kl_BR, torch.zeros_like(kl_BR))
    at_end_BR = columns_R == (response_lengths_B - 1).unsqueeze(1)
    return rewards_BR + torch.where(at_end_BR, scores_B.unsqueeze(1), torch.zeros_like(kl_BR))
