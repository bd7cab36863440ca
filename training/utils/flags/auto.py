"""Choices of flags that were left to `auto`: what was chosen, why, and what turns it off, in a line of the log."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from training.utils.flags.flags import AUTO

AS_BEGUN = "as the run began"
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
