"""Every recipe beside the fastest settings of the same run: seconds of a step by the clock, memory by the dry run.

    python -m threestep.plugins.plan.tests.planned_recipes [NAME ...]

Stage, offload, recomputation and micro-batch vary; sequences of an optimizer step, lengths, adapters and the way of
drawing stay. A GPU is an H100, of 24 GB an RTX 4090. NAME: a part of a recipe's path.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.recipes import ARCHITECTURES, RECIPES, TRAINING, flags_for, gpus_of, hub_name
from threestep.plugins.plan.__main__ import estimate
from threestep.plugins.plan.choices import Choice, Wanted
from threestep.plugins.plan.dry_run.estimate import ModelCounts, kept_counts
from threestep.plugins.plan.search import GIB, fits
from training.utils.base.errors import ThreestepError
from training.utils.flags.step import known_steps

_HOST_BYTES = 250e9  # of a rank: an eighth of a node's 2 TB
_STAGES = ((0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True))


class Judged(NamedTuple):
    """Settings with their seconds; None where they do not fit."""

    choice: Choice
    seconds: float | None
    gib: float


def main() -> None:
    """Print a row for each recipe."""
    counts = kept_counts()
    print("| recipe | GPUs | its settings | seconds | fastest that fits | seconds | its share |\n|" + " --- |" * 7)
    for recipe in RECIPES:
        name = f"{recipe.parent.parent.name.removeprefix('step')[2:]} {recipe.stem}"
        if len(sys.argv) < 2 or any(part in str(recipe) for part in sys.argv[1:]):
            print(row(name, recipe, counts), flush=True)


def row(name: str, recipe: Path, counts: ModelCounts) -> str:
    """The table's row of a recipe."""
    ranks, gigabytes = gpus_of(recipe)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(ARCHITECTURES[hub_name(recipe)][1]))
        own, *others = judged(recipe, Path(folder), counts)
    device = "rtx4090" if gigabytes == 24 else "h100"
    timed = [one for one in [own, *others] if one.seconds is not None]
    if not timed:  # of rows that ranks share the traffic is not counted yet
        return f"| {name} | {ranks} x {device} | {own.choice.words} | not known | - | - | - |"
    best = min(timed, key=lambda one: one.seconds or 0.0)
    mine = f"{own.seconds:.2f}" if own.seconds is not None else f"does not fit: {own.gib:.0f} GiB"
    share = f"{best.seconds / own.seconds:.2f}" if own.seconds and best.seconds else "-"
    return (
        f"| {name} | {ranks} x {device} | {own.choice.words} | {mine} | {best.choice.words}, {best.gib:.0f} GiB | "
        f"{best.seconds:.2f} | {share} |"
    )


def judged(recipe: Path, folder: Path, counts: ModelCounts) -> Iterator[Judged]:
    """The recipe's own settings, then all others."""
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    step = next(step for step in known_steps().values() if recipe.parent.parent.name in step.program)
    places = flags_for(recipe, folder)
    values |= dict(zip((flag.removeprefix("--") for flag in places[::2]), places[1::2], strict=True))
    values["output_dir"] = str(folder / "run")
    ranks, gigabytes = gpus_of(recipe)
    device = "rtx4090" if gigabytes == 24 else "h100"
    wanted = Wanted(device, ranks, 0, (0, 0), int(gigabytes * 1e9), int(_HOST_BYTES), values)
    own = own_choice(values)
    for choice in [own, *choices(values, ranks, own)]:
        try:
            found = estimate(step, counts, wanted, {**values, **flags_of(values, choice)})
        except ThreestepError:
            continue
        memory = found.most()
        parts = found.parts() if fits(memory, wanted) else None
        yield Judged(choice, None if parts is None else sum(parts.values()), memory.device_bytes / GIB)


def own_choice(values: dict[str, Any]) -> Choice:
    """The recipe's settings of those that vary."""
    role = _roles(values)[0]
    return Choice(
        values.get(f"{role}zero_stage", 0),
        bool(values.get("offload")),
        bool(values.get(f"{role}gradient_checkpointing")),
        values[_batch(values)],
    )


def choices(values: dict[str, Any], ranks: int, own: Choice) -> Iterator[Choice]:
    """All others with as many sequences of an optimizer step."""
    each = values[_batch(values)] * values.get("gradient_accumulation_steps", 1)
    sizes = [size for size in range(1, each + 1) if each % size == 0 and size & (size - 1) == 0]
    for stage, offload in _STAGES:
        if stage and ranks == 1 and not offload:
            continue
        for recompute in (False, True):
            for size in sizes:
                choice = Choice(stage, offload, recompute, size)
                if choice != own:
                    yield choice


def flags_of(values: dict[str, Any], choice: Choice) -> dict[str, Any]:
    """The flags of a choice; what the reference and the reward model offload stays with their offload."""
    each = values[_batch(values)] * values.get("gradient_accumulation_steps", 1)
    flags: dict[str, Any] = {
        _batch(values): choice.micro_batch,
        "gradient_accumulation_steps": each // choice.micro_batch,
        "offload": choice.offload,
    }
    for role in _roles(values):
        flags |= {f"{role}zero_stage": choice.zero_stage, f"{role}gradient_checkpointing": choice.recompute}
    for name in ("offload_reference_model", "offload_reward_model"):
        if name in values and not (choice.offload and choice.zero_stage == 3):
            flags[name] = False
    return flags


def _roles(values: dict[str, Any]) -> list[str]:
    """Prefixes of the flags of models that train."""
    return [role for role in ("actor_", "critic_", "") if f"{role}model_name_or_path" in values]


def _batch(values: dict[str, Any]) -> str:
    return next(name for name in values if name in ("per_device_train_batch_size", "per_device_training_batch_size"))


if __name__ == "__main__":
    import os

    os.chdir(TRAINING.parent)
    main()
