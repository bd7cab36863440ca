"""Whether a run may resume from a checkpoint: which settings differ, and which of these may."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.utils.checkpoints.arguments import MAY_CHANGE, PER_STEP, PLACEMENT
from training.utils.run.errors import ThreestepError


def check_settings(found: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """ThreestepError that names every setting of the checkpoint `found` that differs in the resumed run but may not.
    saved, mine: flags by name, and `ranks`."""
    both = saved.keys() & mine.keys()
    batches = {what: flags for what, flags in PER_STEP.items() if {*flags, "ranks"} <= both}
    free = MAY_CHANGE | PLACEMENT | {flag for flags in batches.values() for flag in flags}
    differ = [
        f"{_displayed(name)} was {saved[name]} and is {mine[name]}"
        for name in sorted(both - free)
        if saved[name] != mine[name]
    ]
    for what, flags in batches.items():
        was, now = (math.prod(settings[name] for name in (*flags, "ranks")) for settings in (saved, mine))
        if was != now:
            product = " x ".join(f"--{flag}" for flag in flags)
            differ.append(
                f"the {what} ({product} x ranks) were {was} on {_ranks(saved)} and are {now} on {_ranks(mine)}"
            )
    if differ:
        raise ThreestepError(
            f"--resume: {found} was written with other settings: {'; '.join(differ)}; restore them, or start again in "
            "another --output_dir"
        )


def placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The number of ranks and the ZeRO stages that a run keeps its models in."""
    return {name: settings[name] for name in sorted(PLACEMENT & settings.keys())}


def describe_placement(settings: Mapping[str, Any]) -> str:
    """The same in words."""
    flags = {name: value for name, value in placement(settings).items() if name != "ranks" and value is not False}
    stages = [f"--{name} {value}" for name, value in flags.items()]
    return ", ".join([_ranks(settings), *stages])


def _ranks(settings: Mapping[str, Any]) -> str:
    return f"{settings['ranks']} rank{'' if settings['ranks'] == 1 else 's'}"


def _displayed(name: str) -> str:
    plain = {"program": "the program", "data": "the data's fingerprint"}
    return plain.get(name, name if " " in name else f"--{name}")
