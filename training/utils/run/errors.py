"""Mistakes that a user can make, said in one clear sentence each.

This module knows nothing of datasets, models or engines: it only carries sentences.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class ThreestepError(ValueError):
    """A mistake of the user's: what was expected, what was got, where, and what to do."""


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the names closest to `name`, or "" where none is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    if not close:
        return ""
    return "; did you mean " + " or ".join(f"'{candidate}'" for candidate in close) + "?"


class Mistakes:
    """Collects every mistake of a configuration, so that all are reported at once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def require(self, condition: bool, sentence: str) -> None:
        """Note `sentence` unless `condition` holds."""
        if not condition:
            self.sentences.append(sentence)

    def require_one_of(self, flag: str, got: Any, choices: Iterable[str]) -> None:
        """Note a name that is none of `choices`, with those that are near."""
        choices = list(choices)
        near = nearest_names(str(got), choices)
        self.require(got in choices, f"{flag} expects one of {', '.join(choices)}, got '{got}'{near}")

    def note(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a check returns; where it raises a ThreestepError, note that and return None."""
        try:
            return check(*arguments)
        except ThreestepError as error:
            self.add(str(error))
            return None

    def raise_if_any(self) -> None:
        """Raise one ThreestepError with every sentence noted, one a line."""
        if len(self.sentences) == 1:
            raise ThreestepError(self.sentences[0])
        if self.sentences:
            lines = "\n".join(f"  - {sentence}" for sentence in self.sentences)
            raise ThreestepError(f"{len(self.sentences)} mistakes in the configuration:\n{lines}")
