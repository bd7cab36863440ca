"""Refuse combinations that adapters do not support, before a model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.lora.arguments import ROLES, LoraArguments, RolesLoraArguments
from training.step3_ppo.advantages import WITH_CRITIC
from training.utils.plugins.plugin import StepNeeds
from training.utils.setup.flags import OneModelFlags

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_NOISE = "reads and trains in one forward, so --lora_dropout {} would change the log-probabilities and values it reads"
_REUSE = ("reuse_forwards", "reuse_values")


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note step 3 flags that cannot be combined with adapters (`Hooks.check`)."""
    own: RolesLoraArguments = flags.added.of(RolesLoraArguments)
    for name in _REUSE:
        mistakes.require(
            not (flags.settings.get(name) and own.lora_dropout),
            f"--{name} {_NOISE.format(own.lora_dropout)}; use --lora_dropout 0",
        )
    if own.share_trunk:
        _check_trunk(own, flags, mistakes)


def step_needs(flags: Any) -> StepNeeds:
    """The needs of dropout before adapters, and of a shared trunk (`Hooks.step_needs`)."""
    own = flags.added.of(RolesLoraArguments)
    if own.share_trunk:
        return StepNeeds(own_forwards="actor and critic share a trunk (--share_trunk)")
    return StepNeeds(own_forwards=f"true {_NOISE.format(own.lora_dropout)}" if own.lora_dropout else "")


def adapter_ranks(flags: Any) -> dict[str, int]:
    """Return the ranks of the adapters of the models that a step trains, by flag. flags: as of `Hooks.check`"""
    if isinstance(flags, OneModelFlags):
        return {"--lora_dim": flags.added.of(LoraArguments).lora_dim}
    own = flags.added.of(RolesLoraArguments)
    critic = {"--critic_lora_dim": own.critic_lora_dim} if flags.trains_critic else {}
    return {"--actor_lora_dim": own.actor_lora_dim} | critic


def _check_trunk(own: RolesLoraArguments, flags: Any, mistakes: Mistakes) -> None:
    for role in ROLES:
        dim = getattr(own, f"{role}_lora_dim")
        mistakes.require(
            dim > 0,
            "--share_trunk trains adapters for actor and critic on one frozen trunk, but "
            f"--{role}_lora_dim is {dim}; set it to 1 or more",
        )
    mistakes.require(
        own.only_optimize_lora,
        "--share_trunk keeps the trunk frozen, but --only_optimize_lora false trains it; drop one of them",
    )
    mistakes.require(
        not own.use_dora,
        "--share_trunk with --use_dora is untested, because two models would compute norms of the same trunk weights; "
        "drop one of them",
    )
    stages = flags.roles.actor_zero_stage, flags.roles.critic_zero_stage
    mistakes.require(
        (stages[0] == 3) == (stages[1] == 3),
        f"--share_trunk: ZeRO-3 shards the trunk for both models, but --actor_zero_stage is {stages[0]} and "
        f"--critic_zero_stage is {stages[1]}; use 3 for both or for neither",
    )
    mistakes.require(
        flags.trains_critic is not False,
        f"--share_trunk needs a critic, but --advantage {flags.algorithm.advantage} uses none; drop --share_trunk, or "
        f"use {WITH_CRITIC}",
    )
