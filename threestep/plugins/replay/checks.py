"""Settings that do not go with rollouts in a folder. Cheap to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.replay.arguments import RecordedArguments
from training.utils.flags.added import figures_of_others
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go together. flags: of a step."""
    own = flags.added.of(RecordedArguments)
    if own.rollout_dump is not None and flags.checkpoints.resume is None:
        mistakes.require(
            not any(Path(own.rollout_dump).glob("rollout_*")),
            f"--rollout_dump expects a folder without rollouts, but {own.rollout_dump} has some; choose another, or "
            "use --resume to continue the run that wrote them",
        )
    if own.rollout_replay is not None:
        _check_evaluations(own, flags, mistakes)


def _check_evaluations(own: RecordedArguments, flags: Any, mistakes: Mistakes) -> None:
    """A replay has no responses of its own to held-out prompts, and goes by figures of other data alone."""
    mistakes.require(
        not flags.ppo.val_only,
        f"--val_only evaluates this run's weights, but the responses in --rollout_replay {own.rollout_replay} come "
        "from another run; leave one of them out",
    )
    if figures_of_others(flags.settings):
        return
    ways = "".join(f"{each}, or " for each in added("evaluation_flags", ()).values())
    for name in ("load_best_model_at_end", "early_stopping"):
        mistakes.require(
            not flags.settings.get(name),
            f"--{name} depends on evaluations, but --rollout_replay only has another run's responses; {ways}remove "
            f"--{name}",
        )
