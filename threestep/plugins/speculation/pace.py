"""Measures whether rollouts by guesses are faster than those without, in turns: both draw the same tokens. And whether
one round of a rollout is: the fewer rows are left, the less a second token of each costs beside the first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_MEASURED = 3  # rollouts in either way before anything is said, and how many of the last count
_CHECKED_EVERY = 16  # rollouts, of which one is drawn in the other way
_ROUNDS = 16  # of one number of rows in either way: how many of the last count
_WAYS = {True: "by_guesses", False: "without"}
_KNOWN_ROUNDS, _CHECKED_ROUNDS = 4, 32  # as for rollouts

# Of a rollout: numbers.
Kind = tuple[float, ...]


@dataclass
class _Timed:
    """Rollouts of one size: seconds a token of the last ones by guesses (True) and without (False)."""

    seconds: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_MEASURED) for way in (True, False)}
    )
    count: int = 0

    @property
    def speedup(self) -> float | None:
        """The speed with guesses over that without; None if it is not known yet."""
        by_guesses, without = (self.seconds[way] for way in (True, False))
        if len(by_guesses) < _MEASURED or len(without) < _MEASURED:
            return None
        return median(without) / median(by_guesses)


class Pace:
    """Chooses the way of each rollout, from those before it of the same kind (such as as many rows)."""

    def __init__(self, is_auto: bool) -> None:
        """is_auto: take the faster way once it is known; otherwise guesses, but for the measurements."""
        self._is_auto = is_auto
        self._kinds: dict[Kind, _Timed] = {}
        self.speedup: float | None = None  # of the last rollout's kind

    def guesses_now(self, kind: Kind) -> bool:
        """Return whether the next rollout of this kind is by guesses."""
        known = self._kinds.setdefault(kind, _Timed())
        if known.speedup is None:
            return len(known.seconds[True]) <= len(known.seconds[False])
        usual = known.speedup >= 1.0 or not self._is_auto
        return usual != (known.count % _CHECKED_EVERY == 0)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all that is known, as JSON holds it."""
        return [
            {"kind": list(kind), "count": known.count, **{_WAYS[way]: list(own) for way, own in known.seconds.items()}}
            for kind, known in self._kinds.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for saved in state:
            known = self._kinds[tuple(saved["kind"])] = _Timed(count=saved["count"])
            for way, name in _WAYS.items():
                known.seconds[way].extend(saved[name])

    def note(self, kind: Kind, by_guesses: bool, seconds: float, tokens: int) -> bool:
        """Note a rollout; return whether guesses now pay, or no longer pay, where that was not known before."""
        known = self._kinds.setdefault(kind, _Timed())
        before = known.speedup
        known.count += 1
        known.seconds[by_guesses].append(seconds / max(1, tokens))
        self.speedup = known.speedup
        return self.speedup is not None and (before is None or (before >= 1.0) != (self.speedup >= 1.0))


@dataclass
class _TimedRounds:
    """Rounds of about as many rows: seconds and tokens of a row, by guesses (True) and without (False)."""

    seconds: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_ROUNDS) for way in (True, False)}
    )
    tokens: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_ROUNDS) for way in (True, False)}
    )
    count: int = 0

    def seconds_a_token(self, way: bool) -> float:
        return median(self.seconds[way]) / (sum(self.tokens[way]) / len(self.tokens[way]))

    def guesses_now(self) -> bool:
        known = {way: len(times) for way, times in self.seconds.items()}
        if min(known.values()) < _KNOWN_ROUNDS:
            return known[True] <= known[False]
        return (self.seconds_a_token(True) < self.seconds_a_token(False)) != (self.count % _CHECKED_ROUNDS == 0)


class RoundPace:
    """Chooses the way of each round of a rollout, from those before it of about as many rows."""

    def __init__(self, is_auto: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        """is_auto: take the faster way; otherwise every round guesses."""
        self._is_auto, self._clock = is_auto, clock
        self._known: dict[int, _TimedRounds] = {}
        self._begun: tuple[_TimedRounds, int, bool, float] | None = None

    def begin(self, rows: int) -> bool:
        """Return whether the round that begins, of so many rows, guesses."""
        if not self._is_auto:
            return True
        known = self._known.setdefault(rows.bit_length(), _TimedRounds())
        by_guesses = known.guesses_now()
        self._begun = known, rows, by_guesses, self._clock()
        return by_guesses

    def end(self, tokens: int) -> None:
        """Note the round that was begun, if any, which drew `tokens` in all."""
        if self._begun is None:
            return
        known, rows, by_guesses, started = self._begun
        self._begun = None
        known.count += 1
        known.seconds[by_guesses].append(self._clock() - started)
        known.tokens[by_guesses].append(tokens / rows)
