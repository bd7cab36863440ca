"""The seconds of a step's own dry run on a device that was measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.plan.__main__ import estimate_of
from threestep.plugins.plan.dry_run.estimate import kept_counts
from training.utils.flags.step import known_steps

if TYPE_CHECKING:
    from threestep.plugins.plan.clock.devices import Device

_COUNTS = kept_counts()


def predicted_seconds(kind: str, settings: dict[str, Any], device: Device) -> float:
    """Seconds of one step (of step 3, of a rollout with its updates) on one rank."""
    step = next(step for step in known_steps().values() if step.kind == ("ppo" if kind == "grpo" else kind))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(device.as_json())
        file.flush()
        parts = estimate_of(step, _COUNTS, {**settings, "device": file.name, "num_ranks": 1}).parts()
    assert parts is not None, Path(file.name)
    return sum(parts.values())
