"""Functions and methods of AReaL; the package whole needs CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.conformance.adapters.stubs import stub
from benchmarks.conformance.adapters.watching import released

LACKS: dict[str, str] = {}
always_whole = True  # its engine weights a micro-batch by its tokens: `loss_weight_fn` of its actor's update
_ABSENT = """\
agents anthropic awex bitsandbytes blosc claude_agent_sdk dotenv etcd3 fastapi flash_attn flask gymnasium h5py
kubernetes langchain litellm math_verify matplotlib mbridge megatron mistral_common msgspec nltk numba openai pebble
prettytable pybase64 pynvml aiohttp_retry redis requests_toolbelt setproctitle sglang swanlab tabulate tensorboardX
torchaudio torchvision trackio uvicorn vllm wandb zmq zstandard"""
stub(*_ABSENT.split())


def versions() -> dict[str, str]:
    return released("areal", "torch")


def _shaped(data: dict[str, torch.Tensor], reward_norm: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    """The advantages and returns of a PPOActor without its engine. data: places that predict, prompts of one token."""
    from areal.trainer.ppo.actor import PPOActor

    actor = object.__new__(PPOActor)
    actor.config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=True)
    usual = {
        "reward_bias": 0.0,
        "reward_scaling": 1.0,
        "reward_clip": 20.0,
        "kl_ctl": 0.0,
        "kl_estimator": lambda logprobs, ref: logprobs - ref,
        "mask_no_eos_with_zero": False,
        "discount": 1.0,
        "gae_lambda": 1.0,
        "adv_norm": None,
    }
    for name, value in {**usual, "reward_norm": reward_norm, **settings}.items():
        setattr(actor, name, value)
    return actor._compute_advantages(data)


def _normed(rewards_PG: torch.Tensor, **levels: Any) -> torch.Tensor:
    """Of responses of one token each, whose one reward is the score."""
    from areal.api.cli_args import NormConfig
    from areal.utils.data import Normalization

    count, width = rewards_PG.numel(), 3
    nothing = torch.zeros(count, width)
    place = torch.arange(width)
    data = {
        "input_ids": torch.ones(count, width, dtype=torch.long),
        "attention_mask": (place < 2).long().expand(count, width),
        "loss_mask": (place == 1).expand(count, width),
        "logprobs": nothing.clone(),
        "prox_logp": nothing.clone(),
        "rewards": rewards_PG.flatten(),
    }
    norm = Normalization(NormConfig(mean_level="group", group_size=rewards_PG.shape[1], **levels))
    return _shaped(data, norm)["advantages"][:, 0].view_as(rewards_PG)


def group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _normed(rewards_PG, std_level="group")


def rloo(rewards_PG: torch.Tensor) -> torch.Tensor:
    return _normed(rewards_PG, std_level=None, mean_leave1out=True)


def gae_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Rewards of tokens reach it as the KL to a reference alone: one whose log-probabilities are the rewards."""
    count, longest = rewards.shape
    lengths, place = mask.sum(1, keepdim=True), torch.arange(longest + 2)
    wide = torch.nn.functional.pad
    data = {
        "input_ids": torch.ones(count, longest + 2, dtype=torch.long),
        "attention_mask": (place <= lengths).long(),
        "loss_mask": (place >= 1) & (place <= lengths),
        "logprobs": torch.zeros(count, longest + 2),
        "prox_logp": torch.zeros(count, longest + 2),
        "ref_logp": wide(rewards, (0, 2)),
        "values": wide(values, (0, 2)),
        "rewards": torch.zeros(count),
    }
    return _shaped(data, discount=gamma, gae_lambda=lam, kl_ctl=1.0)["returns"][:, :longest]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    from areal.api.cli_args import NormConfig
    from areal.utils.data import Normalization

    return Normalization(NormConfig())(values, mask.float())


def kl(name: str, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    from areal.utils.data import KLEstimator

    return KLEstimator(name)(logprobs, ref)


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, tokens: float | None
) -> torch.Tensor:
    """Of one micro-batch. tokens: of the whole batch, if its part of the whole is wanted."""
    from areal.utils.functional import ppo_actor_loss_fn

    loss = ppo_actor_loss_fn(logprobs, old, old, advantages, 0.2, mask)[0]
    return loss if tokens is None else loss * (mask.count_nonzero() / tokens)


functions = SimpleNamespace(
    **{name: value for name, value in globals().items() if callable(value) or name == "always_whole"}
)
