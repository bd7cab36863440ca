"""Flags that people know from other programs, and how they are read here.

The tables are beside this module: `deepspeed_chat_flags`, `hf_flags` and `hf_ppo_flags` (TRL's and transformers'). A
flag that is in no table is one of ours. Names in a file of settings are read by the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import flag_in

# From a flag's value (of a list: its words, joined by spaces) and all flags that are given with theirs: the words to
# read instead, or a sentence that says why there are none.
Words = Callable[[str, Mapping[str, str]], "list[str] | str"]

DEEPSPEED_CHAT = "DeepSpeed-Chat"
HUGGING_FACE = "Hugging Face"
TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n")


_DEFAULT = "this is the default"


@dataclass(frozen=True)
class Needless:
    """Accepted, without effect.

    why: what is logged
    takes_value: False for a switch, behind which true or false may stand
    takes_list: any number of words may follow
    whose: the programs that have it
    """

    why: str
    takes_value: bool = True
    takes_list: bool = False
    whose: tuple[str, ...] = (DEEPSPEED_CHAT,)


@dataclass(frozen=True)
class Renamed:
    """Read as a flag of today.

    now: that flag
    note: what else there is to know
    words: what to read instead; default: `now` with the value
    reads_false: a switch that is false is read by `words` too; otherwise it asks for nothing
    overrides: flags of today whose values here count, whatever else is given for them
    differs: how the meaning is another one; "" if it is the same
    """

    now: str
    note: str = ""
    takes_value: bool = True
    words: Words | None = None
    takes_list: bool = False
    reads_false: bool = False
    overrides: tuple[str, ...] = ()
    differs: str = ""
    whose: tuple[str, ...] = (DEEPSPEED_CHAT,)


@dataclass(frozen=True)
class Refused:
    """Refused; `why` names what to use instead. unless: values that ask for nothing, as false does for a switch, and
    `otherwise` says why."""

    why: str
    takes_value: bool = True
    takes_list: bool = False
    unless: tuple[str, ...] = ()
    otherwise: str = _DEFAULT
    whose: tuple[str, ...] = (DEEPSPEED_CHAT,)


@dataclass(frozen=True)
class Same:
    """A flag of ours that has another program's name.

    note: what is worth knowing, such as another default
    spelled: from its words, the words as ours are written; None leaves them
    differs: how the meaning is another one; "" if it is the same
    takes_value: False for a switch that is on by default there, which --no_ in front turns off
    """

    note: str = ""
    takes_value: bool = True
    spelled: Callable[[list[str]], list[str]] | None = None
    differs: str = ""
    whose: tuple[str, ...] = (HUGGING_FACE,)


OldFlag = Needless | Renamed | Refused | Same


def is_false(value: str) -> bool:
    """True if a switch's value turns it off."""
    return value.lower() in FALSE


def translated(
    argv: Sequence[str], old_flags: Mapping[str, OldFlag], given: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Return `argv` in today's flags, and one line for each old flag in it. Raises ThreestepError for refused flags,
    missing values and flags that contradict each other, all at once.

    given: `flags_with_values` of everything that the run is given; default: of `argv`
    """
    mistakes = Mistakes()
    given = flags_with_values(argv) if given is None else given
    words: list[str] = []
    overriding: list[str] = []
    lines: list[str] = []
    read_from: dict[str, tuple[str, list[str]]] = {}  # by today's flag: the one that was typed, and its words
    for shown, shown_values, shown_words in _flags(argv):
        flag, values, typed = _without_no(shown, shown_values, shown_words, old_flags)
        old = old_flags.get(flag)
        if old is None or isinstance(old, Same):
            spelled = values if old is None or old.spelled is None else mistakes.note(old.spelled, values) or values
            if spelled != values:
                typed = [flag, *spelled]
                lines.append(f"{flag} {' '.join(values)} is read as {' '.join(typed)}")
            _note_conflicts(flag, flag, spelled, read_from, mistakes=mistakes)
            words += typed
            continue
        own, rest = _own_values(old, values)
        new, line = _read(flag, old, own, given, mistakes=mistakes)
        lines += [line.replace(f"{flag} false", shown).replace(flag, shown) if shown != flag else line] if line else []
        for name, those, written in _flags(new):
            if isinstance(old, Renamed) and name in old.overrides:
                overriding += written
            else:
                _note_conflicts(flag, name, those, read_from, mistakes=mistakes)
                words += written
        words += rest
    mistakes.raise_if_any()
    return [*words, *overriding], lines


def flags_with_values(argv: Sequence[str]) -> dict[str, str]:
    """Each flag with the words that follow it, joined by spaces."""
    return {flag: " ".join(values) for flag, values, _ in _flags(argv) if flag}


def _flags(argv: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Each flag, its words, and both as they were typed; "" with the words before the first."""
    found: list[tuple[str, list[str], list[str]]] = []
    for word in argv:
        flag = flag_in(word)
        if flag or not found:
            _, has_equals, value = word.partition("=") if flag else ("", True, word)
            found.append((flag, [value] if has_equals else [], [word]))
        else:
            found[-1][1].append(word)
            found[-1][2].append(word)
    return found


def _without_no(
    flag: str, values: list[str], typed: list[str], old_flags: Mapping[str, OldFlag]
) -> tuple[str, list[str], list[str]]:
    """--no_SWITCH, as transformers' parser of flags makes it for switches that are on, as --SWITCH false."""
    name = f"--{flag.removeprefix('--no_')}"
    old = old_flags.get(name)
    if not flag.startswith("--no_") or flag in old_flags or old is None or old.takes_value:
        return flag, values, typed
    return name, ["false", *values], [name, "false", *values]


def _own_values(old: Needless | Renamed | Refused, values: list[str]) -> tuple[list[str], list[str]]:
    """The words that belong to a flag, and those after them."""
    if old.takes_list:
        return values, []
    if old.takes_value or (values and values[0].lower() in (*TRUE, *FALSE)):
        return values[:1], values[1:]
    return [], values


def _read(
    flag: str, old: Needless | Renamed | Refused, values: list[str], given: Mapping[str, str], *, mistakes: Mistakes
) -> tuple[list[str], str]:
    """Today's words for `flag`, and the line that reports them."""
    value = " ".join(values)
    if old.takes_value and not old.takes_list and not values:
        mistakes.add(f"{flag} needs a value, got none")
        return [], ""
    is_switch = not old.takes_value and not old.takes_list
    is_off = is_switch and is_false(value)
    if is_switch and not is_off:
        value = "true"
    unneeded = f"{flag if is_switch and not is_off else f'{flag} {value}'.rstrip()} is not needed: "
    if isinstance(old, Needless):
        return [], f"{flag} is not needed: {old.why}"
    if isinstance(old, Refused):
        if is_off or value.lower() in old.unless:
            return [], f"{unneeded}{_DEFAULT if is_off else old.otherwise}"
        mistakes.add(f"{flag} {old.why}")
        return [], ""
    if is_off and not old.reads_false:
        return [], f"{unneeded}{_DEFAULT}"
    new = mistakes.note(old.words, value, given) if old.words else [old.now, *values]
    if isinstance(new, str):
        return [], unneeded + new
    note = old.note if DEEPSPEED_CHAT in old.whose else ""  # Hugging Face's are for the page alone
    notes = "; ".join(part for part in (note, old.differs) if part)
    return new or [], f"{flag} is read as {' '.join(new or [])}" + (f": {notes}" if notes else "")


def _note_conflicts(
    typed: str, now: str, values: list[str], read_from: dict[str, tuple[str, list[str]]], *, mistakes: Mistakes
) -> None:
    """Note two flags that are read as one with different values. read_from: gets this one too."""

    def shown(flag: str, words: list[str]) -> str:
        return " ".join([now, *words]) + ("" if flag == now else f" (as {flag} is read)")

    other, before = read_from.get(now, (typed, values))
    mistakes.require(
        other == typed or before == values,
        f"{shown(other, before)} and {shown(typed, values)} contradict each other; leave one of them out",
    )
    read_from[now] = (typed, values)


def whole_number(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ThreestepError(f"{flag} must be a whole number, got '{value}'") from None
