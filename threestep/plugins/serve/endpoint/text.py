"""The text of an answer as its tokens come: without its end, cut before a stop text, and shown once it is certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from threestep.plugins.serve.endpoint.lines import LENGTH, STOP, DrawnToken, Event, Line
from training.utils.generation.decoding.drawn import StopStrings

_BROKEN_CHARACTER = "\ufffd"


class AnswerText:
    """The text of one answer. tokens: all that count, the end among them. finish: what ended it; None: it goes on."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], ends: frozenset[int], stop: Sequence[str], strips: bool
    ) -> None:
        """strips: spaces around an answer belong to the prompt style."""
        self._decode, self._ends, self._stop, self._strips = decode, ends, tuple(stop), strips
        self._stops = StopStrings(self._stop, decode) if stop else None
        self._ids: list[int] = []
        self._shown = 0
        self.tokens: list[DrawnToken] = []
        self.finish: str | None = None

    def take(self, drawn: DrawnToken) -> None:
        """Take a token; what comes behind a stop text is left out."""
        if self.finish is not None:
            return
        self.tokens.append(drawn)
        if drawn.token in self._ends:
            self.finish = STOP
            return
        self._ids.append(drawn.token)
        if self._stops is not None and self._stops.completed(self._ids):
            self.finish = STOP

    def follow(self, event: Event, line: Line) -> None:
        """Take an event of `line`, which is drawn no further where a stop text ends the answer: rows do not know it."""
        if event.token is not None:
            self.take(event.token)
            if self.finish is not None:
                line.is_over = True
        elif self.finish is None:
            self.finish = event.ended or LENGTH

    def news(self) -> str:
        """Return what is certain of the text and was not returned before."""
        text = self._certain()
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _certain(self) -> str:
        text = self._decode(self._ids) if self._ids else ""
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            text = text[: min(places)]
        elif self.finish is None:
            # A character of several tokens is shown once it is complete, and what may begin a stop text once it is not.
            text = text.rstrip(_BROKEN_CHARACTER)
            text = text[: len(text) - max((_begun(text, stop) for stop in self._stop), default=0)]
        return text.strip() if self._strips else text


def _begun(text: str, stop: str) -> int:
    """The number of characters at the end of the text that begin the stop text."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
