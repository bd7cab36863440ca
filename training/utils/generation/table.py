"""The table of rollout engines by name, how a flag's value becomes an engine class, and the flags of all engines;
orders for the servers of some.

Cheap to import for `--help`: an engine's module is imported when the engine is selected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_named, named_object
from training.utils.plugins.plugin import EngineEntry
from training.utils.plugins.registry import added, owner_sentence

if TYPE_CHECKING:
    from training.utils.contracts.drawing import TextForm
    from training.utils.contracts.rollout_engine import RolloutEngine

_Kind = TypeVar("_Kind")

ENGINES = {"hf": EngineEntry("training.utils.generation.decoding.hf:TransformersRollout")}
ENGINES |= added("rollout_engines", ENGINES)
FLAG = "--rollout_engine"
_NOTES = "; ".join(f"{name}: {ENGINES[name].note}" for name in reversed(ENGINES) if ENGINES[name].note)
ENGINES_HELP = f"{', '.join(ENGINES)} ({_NOTES}), or your own RolloutEngine as FILE.py:NAME"


def _with_groups(kind: type[_Kind]) -> type[_Kind]:
    """Return `kind` as a dataclass with a field for the flags of each engine that has some."""
    groups = {name: named_object(entry.flags) for name, entry in ENGINES.items() if entry.flags is not None}
    for name, group in groups.items():
        setattr(kind, name, dataclasses.field(default_factory=group))
    kind.__annotations__ = groups
    return dataclasses.dataclass(kind)


@_with_groups
class RolloutEngineFlags:
    """The flags of the engines in the table, a group each."""

    def of(self, kind: type | None) -> Any:
        """Return the group that is a `kind`, such as an engine's `arguments`; None if there is none."""
        groups = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return next((group for group in groups if type(group) is kind), None)

    def refuse_others(self, given: str, mistakes: Mistakes) -> None:
        """Note the flags of engines other than the one of this name that have a value: they have no effect."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.name == given or is_address(given):
                continue
            group = getattr(self, field.name)
            usual = type(group)()
            names = [own.name for own in dataclasses.fields(group)]
            set_flags = [name for name in names if getattr(group, name) != getattr(usual, name)]
            mistakes.require(
                not set_flags,
                f"--{', --'.join(set_flags)}: only for {FLAG} {field.name}, not for {given}; remove these flags",
            )


def engine_class(given: str) -> type[RolloutEngine]:
    """Return the engine of a name or of a FILE.py:NAME; ThreestepError for anything else."""
    from training.utils.contracts.rollout_engine import RolloutEngine

    if is_address(given):
        found = load_named(given, FLAG)
        if not (isinstance(found, type) and issubclass(found, RolloutEngine)):
            raise ThreestepError(f"{FLAG} expects '{given}' to be a subclass of RolloutEngine, got {found!r}")
        return found
    if given not in ENGINES:
        near = owner_sentence("rollout_engines", given) or nearest_names(given, ENGINES)
        raise ThreestepError(f"{FLAG} expects one of {', '.join(ENGINES)} or FILE.py:NAME, got '{given}'{near}")
    return named_object(ENGINES[given].place)


def supporting(what: str) -> list[str]:
    """Return the names of the engines whose class field `supports_WHAT` is True."""
    return [name for name in ENGINES if getattr(engine_class(name), f"supports_{what}")]


def checked_engine(
    given: str, wanted: Mapping[str, Any], mistakes: Mistakes, form: TextForm | None = None, *, draws: bool = True
) -> type[RolloutEngine] | None:
    """Return the engine's class; note an unknown engine (None is returned), a missing package, and each flag of
    `wanted` (min_p, bad_words, stop) that has a value and that the engine does not support. form: of responses. draws:
    False for a plan, for which no package is needed."""
    engine = mistakes.note(engine_class, given)
    if engine is None:
        return None
    if draws:
        mistakes.note(engine.check_installed)
    for flag, value in wanted.items():
        mistakes.require(
            not value or getattr(engine, f"supports_{flag}", False),
            f"{FLAG} {given} does not support --{flag} {value}; remove it, or use another engine",
        )
    mistakes.require(
        form is None or engine.draws_forms,
        f"{FLAG} {given} does not support {form and form.flag}; remove it, or use another engine",
    )
    return engine


@dataclass(frozen=True)
class ServerOrder:
    """model: folder or hub name. name: by which requests ask for it. key: that requests must have. dtype: torch's name.
    template: the file of the chat template. defaults: of sampling, by OpenAI's names, those that differ from drawing
    freely. most_rows: that are drawn together; None leaves it to the server."""

    model: str
    name: str
    address: str
    port: int
    key: str
    dtype: str
    template: str
    defaults: Mapping[str, float]
    most_rows: int | None


@dataclass(frozen=True)
class ServerCommand:
    """words: of the command. variables: further ones of its environment, as the key is: others can read words."""

    words: list[str]
    variables: dict[str, str]
