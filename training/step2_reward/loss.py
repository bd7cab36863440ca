"""The loss of the reward model. Pure: tensors in, tensors out.

Q pairs of responses to the same prompt, the first better than the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossOptions:
    """Options of the ranking loss; 0 turns each off.

    margin_scale: factor of the rows' margins m. Llama 2 (Touvron et al. 2023, equation 2) asks for a gap above m(r),
        larger for pairs of which people were surer: -log sigmoid(better - worse - m).
    label_smoothing: e, the share of pairs assumed to be labelled the wrong way round (Szegedy et al. 2016, section 7;
        of preferences: conservative DPO, Mitchell 2023): -(1 - e) log sigmoid(h) - e log sigmoid(-h), 0 <= e < 0.5.
    center_coef: weight of (better + worse)^2, which holds scores near 0: the ranking loss leaves a constant free for
        every prompt (Eisenstein et al. 2023, section 2; TRL's center_rewards_coefficient).
    """

    margin_scale: float = 0.0
    label_smoothing: float = 0.0
    center_coef: float = 0.0


def ranking_loss(
    better_Q: torch.Tensor,
    worse_Q: torch.Tensor,
    margin_Q: torch.Tensor,
    weight_Q: torch.Tensor,
    *,
    prompts_in_step: float,
    options: LossOptions,
) -> torch.Tensor:
    """Return this micro-batch's part of the step's loss, a scalar: the weighted sum over pairs of

        -(1 - e) log sigmoid(h) - e log sigmoid(-h) + center_coef (better + worse)^2,
        h = better - worse - margin_scale margin,

    divided by prompts_in_step. Plain (InstructGPT, Ouyang et al. 2022, equation 1): -log sigmoid(better - worse).

    better_Q, worse_Q: float32 scores. margin_Q: float32, as the data gives it, 0 where it gives none. weight_Q: each
    pair's share of its prompt; a prompt with K ranked responses has K(K-1)/2 pairs that share a weight of 1, so that
    all prompts weigh the same. prompts_in_step: of the whole optimizer step, on all ranks.
    """
    logit_Q = better_Q - worse_Q - options.margin_scale * margin_Q
    smoothing = options.label_smoothing
    loss_Q = -(1.0 - smoothing) * functional.logsigmoid(logit_Q) - smoothing * functional.logsigmoid(-logit_Q)
    if options.center_coef:
        loss_Q = loss_Q + options.center_coef * (better_Q + worse_Q).square()
    return (loss_Q * weight_Q).sum() / prompts_in_step
