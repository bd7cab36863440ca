"""Flags as fields of dataclasses: default, help, topic and the values that each takes; records made from them; names
that are suggested for unknown ones; choices for flags that were left to `auto`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

OTHER = "task"  # of flags whose group names no topic
# In the order of `--help all`.
TOPICS = {
    OTHER: "This command",
    "model": "Models and tokenizers",
    "data": "Data",
    "columns": "Columns of data files",
    "split": "Rows for training and evaluation",
    "length": "Lengths and truncation",
    "chat": "Prompts, chat templates, and where a response ends",
    "batch": "Batches and the length of training",
    "optimizer": "Optimizer and learning rate",
    "loss": "Loss",
    "rollout": "Sampling responses",
    "reward": "Rewards",
    "advantage": "Advantages",
    "kl": "KL divergence to the reference",
    "policy": "Losses of the policy and the critic",
    "mismatch": "Correction for differences between rollout and training",
    "evaluation": "Evaluation",
    "memory": "Precision, memory and speed",
    "checkpoints": "Checkpoints and resuming",
    "log": "Logs, report and trackers",
    "run": "Run: folder, seed, ranks, dry run, failures",
    "cache": "Cache for tokenized data",
}

_Settings = TypeVar("_Settings")

AUTO = "auto"  # a flag's value that leaves the choice to the program
# Keys of a field's metadata, beside `help`, `aliases`, and `nargs` and `const` of argparse.
VALUES, UNIT, TOPIC = "values", "unit", "topic"
MAY_CHANGE, TAKES_AUTO, DECLARED = "may_change", "takes_auto", "declared"

# How many flags are suggested; how much of two names is the same where one may be meant, or is a slip of the pen.
_MOST, _ALIKE, _SLIP = 3, 0.72, 0.9


def flag_in(word: str) -> str:
    """Return the flag in a word of the command line, with underscores for dashes; "" for a word that is a value."""
    return f"--{word[2:].partition('=')[0].replace('-', '_')}" if word.startswith("--") else ""


def nearest_flags(name: str, names: Sequence[str], dashes: str = "") -> str:
    """Return "; did you mean 'a' or 'b'?" for the flags in `names` that `name` may stand for, or "" if there is none:
    a slip of the pen, what people mean by it, flags with all its words, flags that are written much alike. dashes:
    written before each."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    known = [flag.replace("-", "_") for flag in names]
    alike = difflib.get_close_matches(plain, known, n=_MOST, cutoff=_ALIKE)
    slips = [flag for flag in alike if difflib.SequenceMatcher(None, flag, plain).ratio() > _SLIP]
    with_words = [flag for flag in known if set(plain.split("_")) < set(flag.split("_"))]
    meant = added("meant_flags", ()).get(plain)
    by_name = [flag for flag in meant if flag in known] if meant else [*alike[:1], *sorted(with_words, key=len), *alike]
    found = [*slips[:1], *by_name]
    shown = " or ".join(f"'{dashes}{flag}'" for flag in list(dict.fromkeys(found))[:_MOST])
    return f"; did you mean {shown}?" if shown else ""


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included, and between `above` and `below`, both left out."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        """False for NaN too."""
        return (
            number == number
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"a number from {self.least:g} to {self.most:g}"
        lower = f"more than {self.above:g}" if self.least is None else f"{self.least:g} or more"
        if self.most is not None:
            return f"{lower} and at most {self.most:g}"
        return lower if self.below is None else f"{lower} and less than {self.below:g}"


_TAKES = re.compile(r"(?:(\S+) (<=?) )?(\S+)(?: ([<>]=?) (\S+))?")


def _taken(takes: str) -> tuple[str, Range | None]:
    """The unit and range of a number in a text such as `tokens >= 1` or `0 <= share < 1`."""
    found = _TAKES.fullmatch(takes)
    assert found is not None, f"expected a unit, alone or in a range such as 0 <= share < 1, got '{takes}'"
    low, reaches_low, unit, sign, other = found.groups()
    bounds = {"least" if reaches_low == "<=" else "above": float(low)} if low else {}
    if other:
        bounds[{"<=": "most", "<": "below", ">=": "least", ">": "above"}[sign]] = float(other)
    return unit, Range(**bounds) if bounds else None


def flag(
    default: Any,
    help: str,
    takes: str = "",
    *,
    choices: Collection[str] = (),
    aliases: Sequence[str] = (),
    topic: str = "",
    may_change: bool = False,
    takes_auto: bool = False,
) -> Any:
    """Return a dataclass field. None is not checked, and each item of a list is.

    takes: what a number counts (the test of `--help` lists the units), with its range, such as `0 <= share < 1` or
        `tokens >= 1`; of a text, what it names
    choices: names, one of which is expected
    topic: one of `topics.TOPICS`, if not the group's own (`topic` of the dataclass)
    may_change: a resumed run may give another value: it affects no optimizer step, but for the run's two lengths,
        which move the learning rate's schedule on purpose. `may_change` of the dataclass says so of all its flags
    takes_auto: the word `auto` stands for None, which leaves the choice to the program
    """
    declared: dict[str, Any] = {"default": default, "help": help, "takes": takes, "choices": choices}
    declared |= {"aliases": aliases, "topic": topic, "may_change": may_change, "takes_auto": takes_auto}
    unit, values = _taken(takes) if takes else ("", None)
    metadata: dict[str, Any] = {"help": help, VALUES: choices or values, UNIT: unit, TOPIC: topic}
    metadata |= {MAY_CHANGE: may_change, TAKES_AUTO: takes_auto, DECLARED: declared}
    if aliases:
        metadata["aliases"] = list(aliases)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class _FlagOf:
    """Becomes a field when its class names it, before the class becomes a dataclass."""

    def __init__(self, group: type, changes: dict[str, Any]) -> None:
        self.group, self.changes = group, changes

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, _changed(self.group, name, self.changes))


def flag_of(group: type, help: str = "", **changes: Any) -> Any:
    """Return the field of the flag that `group` declares by the same name, or by `name`. help, changes: what differs
    here, as `flag` takes it."""
    changes = {"help": help, **changes} if help else changes
    return _changed(group, changes.pop("name"), changes) if "name" in changes else _FlagOf(group, changes)


def _changed(group: type, name: str, changes: Mapping[str, Any]) -> Any:
    return flag(**{**group.__dataclass_fields__[name].metadata[DECLARED], **changes})  # type: ignore[attr-defined]


def flags_of(
    group: type, texts: Mapping[str, Any], roles: Sequence[str] = ("",), **changes: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Yield flags of `group` as `dataclasses.make_dataclass` takes them.

    texts: by name, the text here; "" for the group's; a mapping has one for each role
    roles: if any are given, ROLE_NAME is yielded for each of them, and ROLE in a text stands for it
    changes: of all these flags, as `flag` takes them
    """
    kinds = typing.get_type_hints(group)
    for (name, text), role in itertools.product(texts.items(), roles):
        text = text[role] if isinstance(text, Mapping) else text.replace("ROLE", role)
        its = {"help": text, **changes} if text else changes
        yield f"{role}_{name}" if role else name, kinds[name], _changed(group, name, its)


def default_of(field: dataclasses.Field) -> Any:
    """Return a flag's default."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def without_flags(group: type, names: Collection[str]) -> type:
    """Return `group`, or a subclass of it in which the flags `names`, also those of groups in it, are no flags: each
    has its default on the class."""
    changed: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        kind = typing.get_type_hints(group)[field.name]
        if dataclasses.is_dataclass(kind):
            smaller = without_flags(kind, names)  # type: ignore[arg-type]
            if smaller is not kind:
                changed[field.name], values[field.name] = smaller, dataclasses.field(default_factory=smaller)
        elif field.name in names:
            changed[field.name], values[field.name] = ClassVar[Any], default_of(field)
    if not changed:
        return group
    space = {"__annotations__": changed, "__doc__": group.__doc__, "__module__": group.__module__, **values}
    return dataclasses.dataclass(type(group.__name__, (group,), space))


def note_mistakes(group: Any, mistakes: Mistakes) -> None:
    """Note each flag of `group` with a value that it does not take, and what the group's own `validate` finds."""
    for field in dataclasses.fields(group):
        values, got = field.metadata.get(VALUES), getattr(group, field.name)
        if dataclasses.is_dataclass(got):
            note_mistakes(got, mistakes)
        for each in got if isinstance(got, list) else [got]:
            if each is None or values is None:
                continue
            if isinstance(values, Range):
                mistakes.require(each in values, f"--{field.name} expects {values}, got {each}")
            else:
                mistakes.require_one_of(f"--{field.name}", each, values)
    if hasattr(group, "validate"):
        group.validate(mistakes)


def settings_of(
    kind: type[_Settings], flags: Any, role: str | None = None, *, defaults: Collection[str] = (), **others: Any
) -> _Settings:
    """Return a record of `kind`, each field from the flag ROLE_NAME or NAME. others: fields from elsewhere. defaults:
    fields without a flag, which keep their default; a field that is none of these is an AssertionError."""
    values: dict[str, Any] = {}
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    unknown = set(defaults) - {field.name for field in fields}
    assert not unknown, f"{kind.__name__} has no {', '.join(sorted(unknown))}"
    for field in fields:
        sources = {name: getattr(flags, name) for name in (f"{role}_{field.name}", field.name) if hasattr(flags, name)}
        if field.name in others:
            values[field.name] = others.pop(field.name)
        elif field.name not in defaults:
            assert sources, f"{kind.__name__}.{field.name}: no flag of {type(flags).__name__} has this name"
            values[field.name] = next(iter(sources.values()))
        else:
            assert not sources, f"{kind.__name__}.{field.name}: a flag, not its default"
    return kind(**values, **others)


AS_BEGUN = "as when the run started"
_MARK = "  # auto"


class AutoChoice(NamedTuple):
    """name: of the flag. off: its value that turns this off; None where nothing is on."""

    name: str
    value: Any
    why: str
    off: Any = None


def sentence(choices: Sequence[AutoChoice]) -> str:
    """Return the line of the log: `auto: --reuse_forwards true (a forward less; false turns it off)`."""
    return f"{AUTO}: " + ", ".join(map(_in_words, choices))


def marked(text: str, chosen: Collection[str]) -> str:
    """Return the YAML of settings with a mark behind those that the program chose. chosen: their names."""
    return re.sub(rf"^({'|'.join(chosen)}): .*$", rf"\g<0>{_MARK}", text, flags=re.MULTILINE) if chosen else text


def chosen_in(text: str) -> set[str]:
    """Return the names of the settings that are marked so."""
    return set(re.findall(rf"^(\w+): .*{re.escape(_MARK)}$", text, re.MULTILINE))


def _in_words(choice: AutoChoice) -> str:
    off = "" if choice.off is None else f"; {_typed(choice.off)} turns it off"
    return f"--{choice.name} {_typed(choice.value)} ({choice.why}{off})"


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
