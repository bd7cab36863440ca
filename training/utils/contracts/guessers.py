"""Guessers of tokens in speculative rollouts. Cheap to import."""

from __future__ import annotations

from typing import Any, Protocol

# A head that is trained beside the model, or what followed the same tokens before (`ngrams`).
GUESSERS = BY_HEAD, BY_NGRAMS = "head", "ngram"


class LentHead(Protocol):
    """A head that guesses tokens, with whole weights while it is lent.

    depths: its modules, of which the first guesses: `trunk` runs over entries, which `joined` makes of the embedding of
        a token and the model's state before it.
    """

    depths: Any

    def state_dict(self) -> dict[str, Any]: ...
