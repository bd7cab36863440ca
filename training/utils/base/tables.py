"""Tables of the names that a flag accepts: cheap to import, and open to FILE.py:NAME."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.user_files import is_address, load_function, load_named, named_object

Entry = TypeVar("Entry")


def imported(address: str) -> Callable[..., Any]:
    """Return a function that imports MODULE:NAME when it is called, so that a table costs nothing to import."""

    def call(*arguments: Any, **named: Any) -> Any:
        return named_object(address)(*arguments, **named)

    return call


def entry_named(flag: str, given: str, table: Mapping[str, Entry], kind: type[Entry], *, owner: str = "") -> Entry:
    """Return the table's entry of that name, or FILE.py's: an entry of this kind, or one made from a function.
    ThreestepError for anything else, which ends with `owner`, or with the nearest names."""
    if not is_address(given):
        if given not in table:
            near = owner or nearest_names(given, table)
            raise ThreestepError(f"{flag} expects one of {', '.join(table)} or FILE.py:NAME, got '{given}'{near}")
        return table[given]
    loaded = load_named(given, flag)
    return loaded if isinstance(loaded, kind) else kind(load_function(given, flag))  # type: ignore[call-arg]


def either(names: Iterable[str]) -> str:
    """Return 'a, b or c'."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def check_signature(function: Callable[..., Any], flag: str, given: str, parameters: Sequence[str]) -> None:
    """Raise ThreestepError if a user's function cannot be called with these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ThreestepError(
            f"{flag} expects a function of ({', '.join(parameters)}), got '{given}', which takes {signature}: {error}"
        ) from error
