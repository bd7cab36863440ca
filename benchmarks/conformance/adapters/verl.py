"""Functions of verl's core algorithms; the package whole needs CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.conformance.adapters.watching import released

LACKS: dict[str, str] = {}
BETTER = {"policy_split": ("batch_num_tokens of the whole batch", {"whole": True})}


def versions() -> dict[str, str]:
    return released("verl", "torch")


def _inputs(rewards_PG: torch.Tensor) -> dict[str, Any]:
    import numpy as np

    groups = np.repeat(np.arange(len(rewards_PG)), rewards_PG.shape[1])
    rewards = rewards_PG.flatten()[:, None]
    return {"token_level_rewards": rewards, "response_mask": torch.ones_like(rewards), "index": groups}


def group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    return compute_grpo_outcome_advantage(**_inputs(rewards_PG))[0].view_as(rewards_PG)


def rloo(rewards_PG: torch.Tensor) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage

    return compute_rloo_outcome_advantage(**_inputs(rewards_PG))[0].view_as(rewards_PG)


def gae_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    return compute_gae_advantage_return(rewards, values, mask.float(), gamma, lam)[1]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    from verl.utils.torch_functional import masked_whiten

    return masked_whiten(values, mask.float())


def kl(name: str, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import kl_penalty

    return kl_penalty(logprobs, ref, name)


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: float | None
) -> torch.Tensor:
    """Of one micro-batch. tokens: of the whole batch, if its part of the whole is wanted."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    settings = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=8, clip_ratio=0.2)
    settings.global_batch_info.update({"dp_size": 1, "batch_num_tokens": tokens})
    return compute_policy_loss_vanilla(old, logprobs, advantages, mask.float(), "token-mean", settings)[0]


functions = SimpleNamespace(**{name: value for name, value in globals().items() if callable(value)})
