"""The losses of the reward model. Pure: tensors in, tensors out.

Of scores at the responses' ends, or of the tokens from the first one on in which a pair's responses differ
(--loss_from first_difference), as DeepSpeed-Chat's reward model is trained.

Q pairs of responses to the same prompt, the first better than the second; B responses; M comparisons of two tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
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


@dataclass(frozen=True)
class ComparedTokens:
    """better_M, worse_M: int64, flat positions of the two tokens; pair_M: int64, the pair that they are of, whose last
    comparison is that of both ends.
    share_M: float32, a comparison's share of its pair; they add up to 1.
    end_Q: int64, the last comparison of each pair.
    """

    better_M: torch.Tensor
    worse_M: torch.Tensor
    pair_M: torch.Tensor
    share_M: torch.Tensor
    end_Q: torch.Tensor


def compared_tokens(
    input_ids_NT: torch.Tensor,
    end_B: torch.Tensor,
    tokens_B: Sequence[int],
    better_Q: torch.Tensor,
    *,
    worse_Q: torch.Tensor,
) -> ComparedTokens:
    """Compare the two responses of each pair token by token, from the first that differs to the end of the longer
    response; the shorter one keeps the score of its last token.

    Worked example, responses [5 6 7] and [5 8] at the flat positions 2 3 4 and 5 6: they differ from the second token
    on, and 3 is compared with 6, then 4 with 6, half of the pair each. (DeepSpeed-Chat goes as far, and reads
    padding behind the shorter one.)

    input_ids_NT: int64, rows of tokens. end_B: int64, flat position of each response's last token. tokens_B: its
    length, at least 1. better_Q, worse_Q: int64, responses. All on one device.
    """
    ids = input_ids_NT.flatten().cpu()
    ends = end_B.tolist()
    texts = [ids[end - length + 1 : end + 1] for end, length in zip(ends, tokens_B, strict=False)]
    nothing = torch.zeros(0, dtype=torch.int64)
    better, worse, pairs, shares, last = [nothing], [nothing], [nothing], [nothing.float()], []
    done = 0
    for pair, both in enumerate(zip(better_Q.tolist(), worse_Q.tolist(), strict=True)):
        shorter, longer = sorted(len(texts[response]) for response in both)
        differs = texts[both[0]][:shorter] != texts[both[1]][:shorter]
        first = int(differs.int().argmax()) if bool(differs.any()) else min(shorter, longer - 1)
        steps_J = torch.arange(first, longer)
        for places, response in zip((better, worse), both, strict=True):
            length = len(texts[response])
            places.append(ends[response] - length + 1 + steps_J.clamp(max=length - 1))
        pairs.append(torch.full_like(steps_J, pair))
        shares.append(torch.full((len(steps_J),), 1.0 / len(steps_J)))
        done += len(steps_J)
        last.append(done - 1)
    device = end_B.device
    better_M, worse_M, pair_M, share_M = (torch.cat(part).to(device) for part in (better, worse, pairs, shares))
    return ComparedTokens(better_M, worse_M, pair_M, share_M, torch.tensor(last, dtype=torch.int64, device=device))
