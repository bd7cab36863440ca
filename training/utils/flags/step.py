"""The declaration of a step: `STEP` in its package, which programs, reports and packaging read.

A step is a folder `training/step*`: STEP in its `__init__.py`, and a program `main.py`. Knows no step by name.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.utils.base.user_files import is_address, loaded_name
from training.utils.flags.added import AddedFlags, added_flags
from training.utils.flags.arguments import defaults_of, may_change_in
from training.utils.flags.flags import without_flags
from training.utils.plugins.registry import added, flag_names

_PACKAGE = "training"


@dataclass(frozen=True)
class Curve:
    """A chart of a run. metrics: by label; a label that begins with "held-out" belongs to an evaluation.
    is_smooth: without minibatch noise."""

    title: str
    note: str
    metrics: Mapping[str, str]
    is_smooth: bool = False


def added_curves(step: str) -> list[Curve]:
    """Return the curves that plugins add to a step's page. step: its name"""
    return [Curve(*curve) for of_step, *curve in added("curves", ()).values() if of_step == step]


@dataclass(frozen=True)
class Headline:
    """A figure that sums up a step: `metric` at its first and last evaluation. standard_error: of the gain, the key in
    summary.json, if there is one."""

    title: str
    metric: str
    standard_error: str | None = None


SPEED = Curve("Throughput", "tokens per second, all ranks", {"tokens per second": "train/tokens_per_second"})
RATE = Curve("Learning rate", "", {"learning rate": "train/learning_rate"}, is_smooth=True)
NORM = Curve("Gradient norm", "before clipping", {"training": "train/grad_norm"})
LOSS = Curve("Loss", "", {"training": "train/loss", "held-out": "eval/loss"})


@dataclass(frozen=True)
class ClosingRow:
    """A row of all_steps' closing table, of a step's figures on held-out data.

    before, after, error: (key in all_steps' summary.json, key in the step's); error: of the difference
    optional: left out if the step has none of these figures
    """

    title: str
    after: tuple[str, str]
    before: tuple[str, str] | None = None
    error: tuple[str, str] | None = None
    optional: bool = False

    def keys(self) -> tuple[tuple[str, str], ...]:
        return tuple(pair for pair in (self.before, self.after, self.error) if pair)


@dataclass(frozen=True)
class SampleWords:
    """Words of pages on samples.jsonl.

    labels: the models whose responses it holds, before and after training
    note: above the samples. score: what a ranked response's score is called
    """

    labels: tuple[str, str] = ("before", "after")
    note: str = ""
    score: str = "score"


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step that reports and tables show.

    closing: its rows of all_steps' closing table
    evaluates: the figures of its evaluations, by which a run can be judged; `*` stands for names of the user's. Empty:
        not declared
    """

    curves: tuple[Curve, ...] = (LOSS, NORM, SPEED, RATE)
    headlines: tuple[Headline, ...] = (Headline("Loss", "eval/loss"),)
    closing: tuple[ClosingRow, ...] = ()
    evaluates: tuple[str, ...] = ()
    samples: SampleWords = SampleWords()


@dataclass(frozen=True)
class Step:
    """One training program and its report.

    name: the folder, e.g. `step1_sft`
    label: short, e.g. `SFT`
    title: e.g. `supervised fine-tuning`
    groups: the dataclasses that hold its flags; given without those of plugins, which follow as one, `added_flags`,
        and with those of `unread`, which are taken out
    inputs: by the flag that takes a model, the step that leaves it; None: the model that a whole run starts from
    first_flags: those that a first run needs, in the order of --help
    variant: the flag whose value names the method unless it is the default, and the label with that name in it
    reads_media: it trains models that read more than text, and rows with media
    unread: flags of its groups that it has no use for: they are of other steps, with which it may share a file of
        settings, and are set aside with a line of the log
    """

    name: str
    label: str
    title: str
    groups: tuple[type, ...]
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    first_flags: tuple[str, ...] = ()
    variant: tuple[str, str] | None = None
    reads_media: bool = False
    unread: tuple[str, ...] = ()
    figures: StepFigures = StepFigures()

    def __post_init__(self) -> None:
        own = tuple(group for group in self.groups if group is not AddedFlags)
        if own:
            groups = (without_flags(group, self.unread) for group in own)
            object.__setattr__(self, "groups", (*groups, added_flags(self.name)))

    @property
    def number(self) -> str:
        """`1` of `step1_sft`; "" if the name has none."""
        return self.name.partition("_")[0].removeprefix("step")

    @property
    def kind(self) -> str:
        """The name without its number, e.g. `sft`."""
        return self.name.partition("_")[2]

    def label_of(self, settings: Mapping[str, Any]) -> str:
        """The label of a run with these settings, its method's: `grpo` as `GRPO`, `FILE.py:NAME` as `RL (NAME)`."""
        flag, label = self.variant or ("", "")
        default = str(defaults_of(self.groups).get(flag))
        method = str(settings.get(flag, default))
        name = f"RL ({method.rpartition(':')[2]})" if is_address(method) else method.upper()
        return self.label if method == default else label.format(name)

    def title_of(self, settings: Mapping[str, Any]) -> str:
        """The title of a run with these settings."""
        label = self.label_of(settings)
        return self.title if label == self.label else label

    @property
    def old_flags(self) -> Mapping[str, Any]:
        """Names of other programs (DeepSpeed-Chat's, TRL's) that it reads too, of plugins."""
        return flag_names(self.name)

    @property
    def set_aside(self) -> frozenset[str]:
        """`unread` as flags."""
        return frozenset(f"--{name}" for name in self.unread)

    @property
    def defaults(self) -> dict[str, Any]:
        """Every flag with its default."""
        return defaults_of(self.groups)

    @property
    def may_change(self) -> frozenset[str]:
        """The flags that a resumed run may change."""
        return may_change_in(self.groups).union(self.unread)

    @property
    def program(self) -> str:
        """The module, as `python -m` takes it."""
        return f"{_PACKAGE}.{self.name}.main"


UNKNOWN_STEP = Step("step_other", "other", "other steps", ())


@functools.cache
def known_steps() -> dict[str, Step]:
    """Every step of the package, by name, in the order of the names."""
    package = loaded_name(_PACKAGE)
    return {name: importlib.import_module(f"{package}.{name}").STEP for name in _names_of_steps()}


def _names_of_steps() -> list[str]:
    package = importlib.import_module(loaded_name(_PACKAGE))
    return sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name.startswith("step"))


def step_of(settings: Mapping[str, Any]) -> Step:
    """The step that a run's settings belong to: their `program`, or else the step with most of their flags."""
    for name in _names_of_steps():
        if settings.get("program") == f"{_PACKAGE}.{name}.main":
            return importlib.import_module(f"{loaded_name(_PACKAGE)}.{name}").STEP  # without the flags of the others
    steps = known_steps().values()
    flags = {step.name: defaults_of(step.groups).keys() for step in steps}
    distinctive = settings.keys() - set.intersection(*map(set, flags.values()))
    overlaps = {step.name: len(distinctive & flags[step.name]) for step in steps}
    best = max(steps, key=lambda step: (overlaps[step.name], -len(flags[step.name])))
    return best if overlaps[best.name] else UNKNOWN_STEP
