"""Stop strings: texts that end a response.

A response ends with the token that completes one, at any token boundary: the tokenizer's decoded text of the response
so far is searched. The prompt's text does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import Decode, Sampling

# Decoders write this for an incomplete character.
_BROKEN_CHARACTER = "\ufffd"


class StopStrings:
    """Holds the texts, and which tokens can complete one: only for those is the whole response decoded."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        self._last_characters = {text[-1] for text in texts}
        self._can_complete: dict[int, bool] = {}

    def can_complete(self, token_id: int) -> bool:
        """False if no stop string can end within this token's text."""
        if token_id not in self._can_complete:
            # Twice, because some decoders drop the space before the first token of a text.
            written = self._decode([token_id, token_id])
            self._can_complete[token_id] = _BROKEN_CHARACTER in written or any(
                character in written for character in self._last_characters
            )
        return self._can_complete[token_id]

    def completed(self, response_ids: Sequence[int]) -> bool:
        """True if the response's text contains a stop string. Call it after each token, so that the last token is the
        one that completed it."""
        if not self.can_complete(response_ids[-1]):
            return False
        written = self._decode(response_ids)
        return any(text in written for text in self._texts)


def stop_strings(sampling: Sampling, decode: Decode | None) -> StopStrings | None:
    """The stop strings of `sampling`; None if there are none."""
    if not sampling.stop:
        return None
    assert decode is not None, "stop strings need a tokenizer's decode"
    return StopStrings(sampling.stop, decode)


def first_completed(stop: StopStrings, response_ids: Sequence[int]) -> int | None:
    """Return the number of tokens up to and including the one that completes a text; None if none does."""
    lengths = (length for length in range(1, len(response_ids) + 1) if stop.completed(response_ids[:length]))
    return next(lengths, None)
