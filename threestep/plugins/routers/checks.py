"""Refusals of --replay_routers: what draws tokens without their experts, or computes them by its own."""

from __future__ import annotations

from typing import Any

from threestep.plugins.routers.arguments import NO_REPLAY, ReplayArguments
from training.step3_ppo.flags.rollout_choices import source_of
from training.utils.base.errors import Mistakes
from training.utils.base.user_files import either
from training.utils.generation.partners import partners_of
from training.utils.generation.table import ENGINES, engine_class
from training.utils.plugins.plugin import StepNeeds
from training.utils.setup.flags import OneModelFlags


def check_routers(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go with --replay_routers, in the step that has it."""
    if not isinstance(flags, OneModelFlags):
        _check_replay(flags, mistakes)


def step_needs(flags: Any) -> StepNeeds:
    """The needs of replayed experts (`Hooks.step_needs`)."""
    replays = flags.added.of(ReplayArguments).replay_routers != NO_REPLAY
    return StepNeeds(own_forwards="experts are replayed (--replay_routers)" if replays else "")


def _check_replay(flags: Any, mistakes: Mistakes) -> None:
    """Note every flag that does not go with --replay_routers. flags: `PpoFlags`."""
    how, ppo, partners = flags.added.of(ReplayArguments).replay_routers, flags.ppo, partners_of(flags.added)
    engine = Mistakes().note(engine_class, ppo.rollout_engine)
    speculate = flags.settings.get("speculate", "0")  # of a plugin, which may not be there
    if how == NO_REPLAY or engine is None:  # whose name is unknown, which is noted elsewhere
        return
    recording = [name for name in ENGINES if engine_class(name).records_experts]
    mistakes.require(
        engine.records_experts or not source_of(flags).draws,
        f"--replay_routers {how} needs the experts of each token in a rollout, but --rollout_engine "
        f"{ppo.rollout_engine} does not record them; use --rollout_engine {either(recording)}",
    )
    for name, given, why in (
        (partners.flag.removeprefix("--"), partners.is_there, "generate turn by turn, and turns record no experts"),
        ("parallel_thinking", flags.data.form is not None, "generates paths side by side, which record no experts"),
        (f"speculate {speculate}", speculate != "0", "verifies several tokens at once, some of them rejected"),
    ):
        mistakes.require(not given, f"--replay_routers {how}: --{name} {why}; leave one of them out")
