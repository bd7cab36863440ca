"""Groups of flags that plugins add to a program, as its command line would fill them."""

from __future__ import annotations

from typing import Any, get_type_hints

from training.utils.flags.added import AddedFlags, added_flags


def added_groups(program: str, *groups: Any) -> AddedFlags:
    """Return the flags of a program with these groups; all others have their defaults."""
    kind = added_flags(program)
    names = {hint: name for name, hint in get_type_hints(kind).items()}
    found: AddedFlags = kind(**{names[type(group)]: group for group in groups})
    return found
