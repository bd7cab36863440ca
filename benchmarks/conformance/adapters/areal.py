"""Functions of AReaL; the package whole needs CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.conformance.adapters.stubs import stub
from benchmarks.conformance.adapters.watching import released

LACKS = {
    "whiten": "importing its functions loads its servers, which did not import here",
    "policy_loss": "importing its functions loads its servers, which did not import here",
    "group_advantages": "its normalization is part of the actor's configuration",
    "equal_rewards": "its normalization is part of the actor's configuration",
    "rloo": "has no function of its own",
    "gae_returns": "GAE is inside of the actor's compute_advantages",
    "kl_k3": "the KL is inside of the actor's compute_advantages",
    "policy_split": "its engine weights micro-batches by their tokens, beside the loss",
}
stub(*"openai numba flask torchvision mistral_common pybase64 wandb swanlab tensorboardX anthropic litellm".split())


def versions() -> dict[str, str]:
    return released("areal", "torch")


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    from areal.utils.functional import masked_normalization

    return masked_normalization(values, mask)


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: float | None
) -> torch.Tensor:
    from areal.utils.functional import ppo_actor_loss_fn

    return ppo_actor_loss_fn(logprobs, old, old, advantages, 0.2, mask)[0]


functions = SimpleNamespace(**{name: value for name, value in globals().items() if callable(value)})
