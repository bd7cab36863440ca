"""A user's mistakes, in one clear sentence each. Knows nothing of datasets, models or engines."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from training.utils.base.credentials import redacted

_MOST_LISTED = 20


class ThreestepError(ValueError):
    """A user's mistake: what was expected, what was got, where, and what to do; without credentials (`credentials`)."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(redacted(str(sentence)))


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters; its type if it has none."""
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return redacted(line)[:200]  # in this order: half of a credential would not be known again


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the names closest to `name`, or "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    names = " or ".join(f"'{candidate}'" for candidate in close)
    return f"; did you mean {names}?" if close else ""


class Mistakes:
    """Collects every mistake of a configuration, so that all are reported at once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def require(self, condition: bool, sentence: str) -> None:
        """Add `sentence` unless `condition` holds."""
        if not condition:
            self.sentences.append(sentence)

    def require_one_of(self, flag: str, got: Any, choices: Iterable[str]) -> None:
        """Add a mistake if `got` is not in `choices`, with the nearest of them."""
        choices = list(choices)
        near = nearest_names(str(got), choices)
        self.require(got in choices, f"{flag} expects one of {', '.join(choices)}, got '{got}'{near}")

    def note(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `check` returns; if it raises a ThreestepError, add that and return None."""
        try:
            return check(*arguments)
        except ThreestepError as error:
            self.add(str(error))
            return None

    @property
    def different(self) -> list[str]:
        """The sentences, each once, with how often it was added."""
        counts = Counter(self.sentences)
        return [sentence if count == 1 else f"{sentence} ({count:,} times)" for sentence, count in counts.items()]

    def raise_if_any(self) -> None:
        """Raise one ThreestepError with the different sentences, one a line."""
        different = self.different
        if len(different) == 1:
            raise ThreestepError(different[0])
        if different:
            more = [f"and {len(different) - _MOST_LISTED:,} more"] if len(different) > _MOST_LISTED else []
            lines = "\n".join(f"  - {sentence}" for sentence in [*different[:_MOST_LISTED], *more])
            raise ThreestepError(f"{len(different):,} mistakes in the configuration:\n{lines}")
