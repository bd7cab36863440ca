"""Functions of OpenRLHF; the package whole needs CUDA, Ray and vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.conformance.adapters.stubs import stub
from benchmarks.conformance.adapters.watching import released

LACKS = {"whiten": "whitening is inside of its compute_advantages_and_returns"}
BETTER = {"policy_split": ("batch_num_tokens of the whole batch, as its trainer passes it", {"whole": True})}
stub("flash_attn", "bitsandbytes", "vllm")


def versions() -> dict[str, str]:
    return released("openrlhf", "torch")


def _maker(estimator: str, samples: int) -> Any:
    """An ExperienceMaker without its workers."""
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    maker = object.__new__(RemoteExperienceMaker)
    space = SimpleNamespace
    maker.strategy = space(
        args=space(
            rollout=space(n_samples_per_prompt=samples),
            algo=space(advantage=space(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)),
            reward=space(
                clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None, overlong_penalty_factor=1.0
            ),
        )
    )
    maker.advantage_estimator = estimator
    maker.kl_ctl = space(value=0.0)
    return maker


def _shaped(estimator: str, rewards_PG: torch.Tensor) -> torch.Tensor:
    count = rewards_PG.numel()
    experience = SimpleNamespace(
        rewards=rewards_PG.flatten().clone(),
        index=list(range(count)),
        info={},
        kl=torch.zeros(count, 1),
        action_mask=torch.ones(count, 1, dtype=torch.bool),
        truncated=torch.zeros(count),
        response_length=torch.ones(count),
    )
    _maker(estimator, rewards_PG.shape[1]).compute_advantages_and_returns([experience])
    return experience.advantages.view_as(rewards_PG)


def group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _shaped("group_norm", rewards_PG)


def rloo(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _shaped("rloo", rewards_PG)


def gae_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    return _maker("gae", 1).get_advantages_and_returns(values, rewards, mask, gamma, lam)[1]


def kl(name: str, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    from openrlhf.models.utils import compute_approx_kl

    return compute_approx_kl(logprobs, ref, kl_estimator=name)


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: float | None
) -> torch.Tensor:
    """Of one micro-batch. tokens: of the whole batch, if its part of the whole is wanted."""
    from openrlhf.models.loss import PolicyLoss

    return PolicyLoss()(logprobs, old, advantages, action_mask=mask, batch_num_tokens=tokens)[0]


functions = SimpleNamespace(**{name: value for name, value in globals().items() if callable(value)})
