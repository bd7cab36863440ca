"""Rewards, advantages and returns by the functions of verl, OpenRLHF and AReaL on rollouts drawn at random, recorded.

python -m threestep.plugins.audit.tests.other_trainers.policy_functions verl|openrlhf|areal FOLDER     in the
environment `verl`

Their trainers need a GPU; these functions do not. Packages that they import and never call here are stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from threestep.plugins.audit.recorders import frameworks
from threestep.plugins.audit.recording.files import StepRecord, write_record

GROUPS, SAMPLES, LONGEST = 4, 4, 9
NAMES = (
    "flash_attn", "bitsandbytes", "vllm", "openai", "numba", "flask", "torchvision", "mistral_common", "pybase64",
    "wandb", "swanlab", "trackio", "tensorboardX", "litellm", "anthropic", "agents", "megatron", "sglang", "mbridge",
    "kubernetes", "etcd3", "claude_agent_sdk", "cachetools", "uvicorn", "fastapi", "zmq", "math_verify", "nltk",
    "awex", "werkzeug", "gymnasium", "pynvml", "aiohttp_retry", "prettytable", "requests_toolbelt", "lark",
    "tabulate", "zstandard", "msgspec", "setproctitle", "pebble", "redis", "blosc", "h5py", "langchain", "mathruler",
    "word2number", "dotenv", "seaborn", "json5", "qwen_agent", "torchaudio", "swanboard", "matplotlib", "colorama",
)  # fmt: skip
GAE = {"advantage": "gae", "gamma": 0.99, "lam": 0.95, "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of nothing, for packages of NAMES that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


def rollout(seed: int) -> dict[str, torch.Tensor]:
    """Rectangles [B, R], right-padded; scores [B]."""
    drawn = torch.Generator().manual_seed(seed)
    rows = GROUPS * SAMPLES
    lengths = torch.randint(1, LONGEST + 1, (rows, 1), generator=drawn)
    lengths[0] = LONGEST
    mask = (torch.arange(LONGEST) < lengths).float()
    old, ref, values = (torch.randn(rows, LONGEST, generator=drawn) * mask for _ in range(3))
    return {"mask": mask, "old": old - 2.0 * mask, "ref": ref - 2.0 * mask, "values": values,
            "scores": torch.randn(rows, generator=drawn)}  # fmt: skip


def verl(made: dict[str, torch.Tensor]) -> Iterator[tuple[str, StepRecord]]:
    """Yield GAE and GRPO, as verl's compute_advantage calls them."""
    import numpy as np
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos

    mask, ends = made["mask"], made["mask"].sum(dim=1).long() - 1
    scores = torch.zeros_like(mask).scatter(1, ends.unsqueeze(1), made["scores"].unsqueeze(1))
    rewards = scores - 0.1 * core_algos.kl_penalty(made["old"], made["ref"], kl_penalty="kl") * mask
    uid = np.repeat(np.arange(GROUPS), SAMPLES)
    parts = {"response_mask": mask, "token_level_scores": scores, "token_level_rewards": rewards,
             "old_log_probs": made["old"], "ref_log_prob": made["ref"]}  # fmt: skip
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, made["values"], mask, 0.99, 0.95)
    more = {"values": made["values"], "advantages": advantages, "returns": returns}
    batch = DataProto.from_dict(tensors={**parts, **more}, non_tensors={"uid": uid})
    yield "gae", frameworks.verl_record(batch, {**GAE, "whiten": True})
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid)
    batch = DataProto.from_dict(tensors={**parts, "advantages": advantages}, non_tensors={"uid": uid})
    settings = {"advantage": "grpo", "norm_by": "group", "std_ddof": 1.0, "std_epsilon": 1e-6}
    yield "grpo", frameworks.verl_record(batch, {**GAE, **settings})
    advantages, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, uid)
    batch = DataProto.from_dict(tensors={**parts, "advantages": advantages}, non_tensors={"uid": uid})
    yield "rloo", frameworks.verl_record(batch, {**GAE, "advantage": "rloo", "norm_by": "none"})


def openrlhf(made: dict[str, torch.Tensor]) -> Iterator[tuple[str, StepRecord]]:
    """Yield GAE, group norm and RLOO by RemoteExperienceMaker.compute_advantages_and_returns."""
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    group = {"advantage": "grpo", "norm_by": "group", "std_ddof": 1.0, "std_epsilon": 1e-9, "kl_in": "none"}
    rloo = {"advantage": "rloo", "norm_by": "none", "kl_in": "none"}
    own = {"group_norm": group, "rloo": rloo, "gae": {**GAE, "whiten": True}}
    for name, settings in own.items():
        coefficient = 0.1 if name == "gae" else 0.0
        maker = object.__new__(RemoteExperienceMaker)
        advantage = SimpleNamespace(estimator=name, gamma=0.99 if name == "gae" else 1.0, lambd=0.95, no_std_norm=False)
        maker.strategy = SimpleNamespace(
            args=MagicMock(
                algo=SimpleNamespace(advantage=advantage), rollout=SimpleNamespace(n_samples_per_prompt=SAMPLES),
                reward=MagicMock(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
            )
        )  # fmt: skip
        maker.advantage_estimator, maker.kl_ctl = name, SimpleNamespace(value=coefficient)
        rows = [slice(begin, begin + SAMPLES) for begin in range(0, GROUPS * SAMPLES, SAMPLES)]
        experiences = [
            Experience(
                action_mask=made["mask"][row].bool(), action_log_probs=made["old"][row],
                base_action_log_probs=made["ref"][row], values=made["values"][row],
                kl=(made["old"] - made["ref"])[row], rewards=made["scores"][row].clone(),
                index=list(range(row.start, row.stop)), info={},
            )
            for row in rows
        ]  # fmt: skip
        experiences = maker.compute_advantages_and_returns(experiences)
        yield name, frameworks.openrlhf_record(experiences, SAMPLES, settings)


def areal(made: dict[str, torch.Tensor]) -> Iterator[tuple[str, StepRecord]]:
    """Yield GAE by PPOActor's compute_advantages: prompts of one token, places that predict."""
    from areal.trainer.ppo.actor import PPOActor

    actor = object.__new__(PPOActor)
    actor.config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=True)
    actor.reward_bias, actor.reward_scaling, actor.reward_clip, actor.reward_norm = 0.0, 1.0, 20.0, None
    actor.kl_ctl, actor.kl_estimator = 0.1, lambda old, ref: old - ref
    actor.mask_no_eos_with_zero, actor.discount, actor.gae_lambda, actor.adv_norm = False, 0.99, 0.95, None
    width = LONGEST + 2  # a prompt, and padding after the longest: no response is cut
    lengths = made["mask"].sum(dim=1, keepdim=True)
    place = torch.arange(width)
    loss_mask = (place >= 1) & (place <= lengths)
    more = {name: torch.nn.functional.pad(made[theirs], (0, 2))
            for name, theirs in (("prox_logp", "old"), ("ref_logp", "ref"), ("values", "values"))}  # fmt: skip
    data = actor._compute_advantages({
        "input_ids": torch.ones(len(lengths), width, dtype=torch.long), "attention_mask": (place <= lengths).long(),
        "loss_mask": loss_mask, "logprobs": more["prox_logp"], "rewards": made["scores"], **more,
    })  # fmt: skip
    yield "gae", frameworks.areal_record(data, SAMPLES, {**GAE, "whiten": False})


def main(argv: list[str]) -> None:
    name, folder = argv
    sys.meta_path.append(StandIns())
    for seed in range(3):
        for estimator, record in {"verl": verl, "openrlhf": openrlhf, "areal": areal}[name](rollout(seed)):
            write_record(Path(folder, f"{estimator}_{seed}"), record)


if __name__ == "__main__":
    main(sys.argv[1:])
