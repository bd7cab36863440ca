"""digests.jsonl of a run, and what else of its folder a comparison needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threestep.plugins.audit.reading import read_settings
from threestep.plugins.audit.recording.schema import DIGESTS, DIGESTS_VERSION
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, text_if_there

StepKey = tuple[int, int]  # the step, and in step 3 its optimizer step from 1; otherwise 0
_AT_HAND = (
    "digests", "explain_steps", "keep_last", "output_dir", "overwrite", "profile_steps", "record_steps",
    "record_values", "report", "report_to", "resume", "run_name", "save_at_end", "save_epochs", "save_every",
)  # fmt: skip


@dataclass(frozen=True)
class RunDigests:
    """folder: of the run. begin: the line of its beginning; resumed: those of later ones. steps: by their key, in
    order. settings: of config.yaml. environment: of environment.json."""

    folder: Path
    begin: Mapping[str, Any]
    resumed: tuple[Mapping[str, Any], ...]
    steps: Mapping[StepKey, Mapping[str, Any]]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def program(self) -> str:
        return str(self.begin["program"])

    @property
    def threads(self) -> int | None:
        """The threads of each rank; None if they are not known."""
        found = re.search(r"(\d+) thread", str(self.environment.get("device")))
        return int(found[1]) if found else None

    def ranks_at(self, step: int) -> int:
        """The number of ranks that took a step."""
        lines = [line for line in (self.begin, *self.resumed) if line["begins_after"] < step]
        return int((lines or [self.begin])[-1]["ranks"])


def read_digests(folder: Path) -> RunDigests:
    """Read a run; ThreestepError for a folder without digests, or with those of another version."""
    path = folder / DIGESTS
    text = text_if_there(path)
    if text is None:
        raise ThreestepError(
            f"{folder} has no {DIGESTS}; runs on a CPU write it unless --digests is false, and runs on a GPU write "
            "it with --digests true"
        )
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), start=1)]
    versions = [checked_json(_Version, line, where).digests for where, line in lines]
    if not versions or versions[0] is None:
        raise ThreestepError(f"the first line of {path} has no `digests`: the file is incomplete")
    begins, steps = list[dict[str, Any]](), dict[StepKey, dict[str, Any]]()
    for version, (where, line) in zip(versions, lines, strict=True):
        if version is None:
            step = step_of(line, where)
            steps[step["step"], step["update"]] = step
        elif version == DIGESTS_VERSION:
            begins.append(_known(checked_json(_BeginLine, line, where)))
        else:
            raise ThreestepError(
                f"{path} has digests of version {version}, but this threestep reads version {DIGESTS_VERSION}; "
                "compare the runs with the version of threestep that wrote it"
            )
    about = text_if_there(folder / "environment.json")
    environment = {} if about is None else _known(checked_json(_Environment, about, folder / "environment.json"))
    return RunDigests(folder, begins[0], tuple(begins[1:]), steps, read_settings(folder / "config.yaml"), environment)


# What a comparison reads, and its types. A number that was not finite is None.
_Number = float | None


@dataclass(frozen=True)
class _Version:
    digests: int | None = None


@dataclass(frozen=True)
class _BeginLine:
    begins_after: int
    program: str
    ranks: int
    weights: dict[str, dict[str, tuple[str, _Number, _Number]]]
    version: str = ""


@dataclass(frozen=True)
class _StepLine:
    step: int
    hashes: dict[str, str]
    floats: dict[str, tuple[_Number] | tuple[_Number, _Number, _Number, _Number]]
    figures: dict[str, _Number]
    update: int = 0
    gradients: dict[str, dict[str, _Number]] | None = None
    weights: dict[str, dict[str, tuple[str, _Number]]] | None = None


@dataclass(frozen=True)
class _Environment:
    device: str | None = None
    versions: dict[str, str | None] | None = None
    commit: str | None = None


def step_of(line: str, where: object) -> dict[str, Any]:
    """Return the digests of a step; ThreestepError for a line that has not their types."""
    return _known(checked_json(_StepLine, line, where))


def _known(found: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if value is not None}


def settings_that_differ(a: RunDigests, b: RunDigests) -> dict[str, tuple[Any, Any]]:
    """Flags of which the runs have other values, but for those of folders and of what is written when."""
    names = sorted(a.settings.keys() | b.settings.keys())
    pairs = {name: (a.settings.get(name), b.settings.get(name)) for name in names if name not in _AT_HAND}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# Flags that change the order of sums and nothing else.
_OF_ROUNDING = (
    "activation_offload", "actor_zero_stage", "attn_implementation", "critic_zero_stage", "dtype",
    "gradient_accumulation_steps", "gradient_checkpointing", "head_chunk_mb", "max_tokens_per_micro_batch", "mlp_tiles",
    "offload", "padded", "per_device_eval_batch_size", "per_device_generation_batch_size",
    "per_device_train_batch_size", "per_device_training_batch_size", "share_beginnings", "zero_stage",
)  # fmt: skip


def causes_of_rounding(a: RunDigests, b: RunDigests) -> list[str]:
    """Reasons, in words, why rounding may differ; none: the runs should be equal bit for bit."""
    found = [f"--{name} {x} and {y}" for name, (x, y) in settings_that_differ(a, b).items() if name in _OF_ROUNDING]
    if a.begin["ranks"] != b.begin["ranks"]:
        found.insert(0, f"{a.begin['ranks']} and {b.begin['ranks']} ranks")
    differing = environments_that_differ(a.environment, b.environment)
    return [*found, *(f"{name} {x} and {y}".strip() for name, (x, y) in differing.items() if name != "commit")]


def environments_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs in two contents of environment.json: the device with its threads, named "", versions and
    the commit. Entries that one of them lacks are not compared."""
    sides = [
        {"": _device(side.get("device")), **side.get("versions", {}), "commit": side.get("commit")} for side in (a, b)
    ]
    pairs = {name: (sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1]}
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


def _device(words: str | None) -> str | None:
    """ "2 ranks on cpu, 1 thread each (of 2 cores)" is "cpu, 1 thread": ranks are compared by themselves."""
    return None if words is None else re.sub(r" each\b| \([^)]*\)", "", words.partition(" on ")[2] or words)
