"""The divergence between a teacher's and a student's next-token distribution. Pure tensors.

All distributions are log-probabilities over V outcomes: the vocabulary, or k tokens and all others together. M tokens
to be predicted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from threestep.plugins.distillation.settings import FORWARD, REVERSE

if TYPE_CHECKING:
    from threestep.plugins.distillation.settings import DivergenceSettings


def divergence(student_MV: torch.Tensor, teacher_MV: torch.Tensor, settings: DivergenceSettings) -> torch.Tensor:
    """Return [M], nats, of student S and teacher T:

        forward   KL(T, S) = sum_v T (log T - log S)
        reverse   KL(S, T)
        js        beta KL(T, X) + (1 - beta) KL(S, X), where X = beta T + (1 - beta) S

    The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, arXiv:2306.13649). TRL's beta 0 is `forward`
    and its 1 `reverse`; of `js` both limits are 0, and it is refused there.
    """
    least = torch.finfo(student_MV.dtype).min / 4  # of a token that a model rules out, where log 0 would give NaN
    student_MV, teacher_MV = student_MV.clamp(min=least), teacher_MV.clamp(min=least)
    if settings.kind == FORWARD:
        return _kl(teacher_MV, student_MV)
    if settings.kind == REVERSE:
        return _kl(student_MV, teacher_MV)
    beta = settings.beta
    mixture_MV = torch.logaddexp(teacher_MV + math.log(beta), student_MV + math.log1p(-beta))
    return beta * _kl(teacher_MV, mixture_MV) + (1.0 - beta) * _kl(student_MV, mixture_MV)


def _kl(first_MV: torch.Tensor, second_MV: torch.Tensor) -> torch.Tensor:
    return (first_MV.exp() * (first_MV - second_MV)).sum(dim=-1)


def with_rest(logprobs_MV: torch.Tensor, ids_Mk: torch.Tensor) -> torch.Tensor:
    """Return [M, k + 1]: log-probabilities of the tokens `ids_Mk`, and of all others together, the last.

    A distribution again, so that divergences are at least 0, and at most those of the whole vocabulary. k tokens alone
    are none (their "KL" may be below 0), and divided by their sum they are another one.
    """
    rest_M = logprobs_MV.scatter(-1, ids_Mk, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logprobs_MV.gather(-1, ids_Mk), rest_M], dim=-1)
