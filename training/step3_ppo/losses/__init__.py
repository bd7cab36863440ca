"""The losses of step 3, one file each, and the table of the policy losses' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from training.step3_ppo.losses.cispo import cispo
from training.step3_ppo.losses.covariance import clip_cov, clip_cov_keys, kl_cov, kl_cov_keys
from training.step3_ppo.losses.gpg import gpg
from training.step3_ppo.losses.gspo import gspo
from training.step3_ppo.losses.ppo import ppo
from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


@dataclass(frozen=True)
class PolicyLoss:
    """loss: see `losses.tokens`. keys: for losses that treat some tokens apart, what these are chosen by (see
    `losses.covariance`). aggregation, clip_low, clip_high: what its authors use, where the user says nothing."""

    loss: Callable[[PolicyTokens, PolicyLossSettings], tuple[torch.Tensor, torch.Tensor]]
    keys: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor] | None = None
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2


POLICY_LOSSES = {
    "ppo": PolicyLoss(ppo),
    "gspo": PolicyLoss(gspo, aggregation="seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": PolicyLoss(cispo, clip_low=1.0, clip_high=4.0),  # from 0, which is no bound, to 5
    "gpg": PolicyLoss(gpg),
    "kl_cov": PolicyLoss(kl_cov, keys=kl_cov_keys),
    "clip_cov": PolicyLoss(clip_cov, keys=clip_cov_keys),
}
