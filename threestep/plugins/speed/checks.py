"""Refusals of flags that do not go together, before a model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.speed.arguments import CompilingArguments, SpeedArguments
from training.utils.plugins.plugin import StepNeeds

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

_RECOMPUTES = ("gradient_checkpointing", "actor_gradient_checkpointing", "critic_gradient_checkpointing")


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what these flags do not go with (`Hooks.check`)."""
    own, compiles = flags.added.of(SpeedArguments), flags.added.of(CompilingArguments).torch_compile
    settings = flags.settings
    mistakes.require(
        not own.activation_offload or any(settings.get(name) for name in _RECOMPUTES),
        "--activation_offload moves to host memory the layer inputs that gradient checkpointing stores; add "
        "--gradient_checkpointing (in step 3, --actor_gradient_checkpointing or --critic_gradient_checkpointing), or "
        "leave --activation_offload out",
    )
    mistakes.require(
        own.mlp_tiles == 1 or not compiles,
        f"--mlp_tiles {own.mlp_tiles} and --torch_compile change the same forward pass and have never been tested "
        "together; leave one of them out",
    )
    mistakes.require(
        not (own.use_liger_kernel and compiles),
        "--use_liger_kernel and --torch_compile fuse the same operations in two ways; leave one of them out",
    )
    replayed = settings.get("replay_routers", "none")
    mistakes.require(
        own.mlp_tiles == 1 or replayed == "none",
        f"--mlp_tiles {own.mlp_tiles} computes routers tile by tile, but --replay_routers {replayed} replays them "
        "for whole rows; leave one of them out",
    )
    rounding = next((name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)), None)
    mistakes.require(
        rounding is None or not compiles,
        f"--{rounding} does not work with --torch_compile, which compiles the layers that --{rounding} replaces; "
        "leave one of them out",
    )


def step_needs(flags: Any) -> StepNeeds:
    """The needs of compiled models (`Hooks.step_needs`)."""
    return StepNeeds({"--torch_compile": flags.added.of(CompilingArguments).torch_compile})
