"""Words for the tables of Hugging Face's flags: kinds of entries, and readings that several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from threestep.plugins.names.other_names import HUGGING_FACE, Needless, OldFlag, Refused, Renamed, Same, Words, is_false
from training.utils.base.errors import ThreestepError

renamed = partial(Renamed, whose=(HUGGING_FACE,))
needless = partial(Needless, whose=(HUGGING_FACE,))
refused = partial(Refused, whose=(HUGGING_FACE,))
renamed_switch = partial(renamed, takes_value=False)
needless_switch = partial(needless, takes_value=False)
refused_switch = partial(refused, takes_value=False)

NO_VALUE = ("none", "null", "")
NO_DICTIONARY = (*NO_VALUE, "{}")


def number(flag: str, value: str) -> float:
    """The value as a number; ThreestepError if it is none."""
    try:
        return float(value)
    except ValueError:
        raise ThreestepError(f"{flag} expects a number, got '{value}'") from None


def same(flags: str) -> dict[str, OldFlag]:
    """Flags, with blanks between them, that mean the same here."""
    return dict.fromkeys(flags.split(), Same())


def either_way(on: list[str], off: list[str] | str = "") -> Words:
    """For a switch: the words for on and for off, or why there are none."""
    return lambda value, _given: off if is_false(value) else on


def by_value(readings: Mapping[str, list[str] | str], otherwise: str) -> Words:
    """For a flag that takes the keys of `readings`: the words for each, or why there are none. otherwise: the error for
    another value, {} in its place."""

    def words(value: str, _given: Mapping[str, str]) -> list[str] | str:
        if value not in readings:
            raise ThreestepError(otherwise.format(value))
        return readings[value]

    return words


def listed(flag: str) -> Words:
    """For a flag of several words, which `flag` takes with commas between them."""
    return lambda value, _given: [flag, ",".join(value.replace(",", " ").split())]
