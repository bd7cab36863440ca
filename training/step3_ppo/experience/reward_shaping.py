"""From one score per response to one reward per token, and penalties for a response's end and length. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

import torch


def shaped_rewards(
    scores_B: torch.Tensor,
    kl_BR: torch.Tensor,
    response_lengths_B: torch.Tensor,
    kl_coef: float,
    *,
    turns_BR: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rewards_BR: the score on each response's last real token, minus kl_coef x KL on every token.

    scores_B: float32. kl_BR: float32, read inside the response only. response_lengths_B: int64 >= 1. turns_BR: float32,
        the part of the score that turns of a conversation have earned, each at its last token; None: no part.
    Stiennon et al. 2020, section 3.4; InstructGPT (Ouyang et al. 2022), equation 2.
    """
    columns_R = torch.arange(kl_BR.shape[1], device=kl_BR.device)
    inside_BR = columns_R < response_lengths_B.unsqueeze(1)
    rewards_BR = torch.where(inside_BR, -kl_coef * kl_BR, torch.zeros_like(kl_BR))
    if turns_BR is not None:
        scores_B = scores_B - turns_BR.sum(dim=1)
        rewards_BR = rewards_BR + turns_BR
    at_end_BR = columns_R == (response_lengths_B - 1).unsqueeze(1)
    return rewards_BR + torch.where(at_end_BR, scores_B.unsqueeze(1), torch.zeros_like(kl_BR))


def missing_eos_punishment(ended_B: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return float32 [B], -penalty where a response did not end by itself, else 0.

    ended_B: bool. Stiennon et al. 2020 give such responses a fixed low score; TRL subtracts, as here.
    """
    return -penalty * (~ended_B).float()


def overlong_punishment(response_lengths_B: torch.Tensor, max_tokens: int, buffer_tokens: int) -> torch.Tensor:
    """Return float32 [B]: 0 up to max - buffer tokens, from there on a straight line down to -1 at max tokens.

    buffer_tokens 0 punishes nothing. The soft over-long punishment of DAPO (Yu et al. 2025, equation 13).
    """
    if buffer_tokens == 0:
        return torch.zeros(response_lengths_B.shape, device=response_lengths_B.device)
    free_tokens = max_tokens - buffer_tokens
    return ((free_tokens - response_lengths_B).float() / buffer_tokens).clamp(-1.0, 0.0)
