"""Texts that end a response.

A response ends with the token that completes one of them, wherever tokens begin and end: what counts is the text of the
response so far, as the tokenizer decodes it. The prompt's text does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.step3_ppo.rollout.base import Decode, Sampling

# What decoders write for bytes that are no whole character yet.
_BROKEN_CHARACTER = "\ufffd"


class StopStrings:
    """Knows the texts, and which tokens can complete one: decoding a whole response is left for those."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        self._last_characters = {text[-1] for text in texts}
        self._can_complete: dict[int, bool] = {}

    def can_complete(self, token_id: int) -> bool:
        """False where no text can end in this token's."""
        if token_id not in self._can_complete:
            # Twice, because some decoders drop the space before the first token of a text.
            written = self._decode([token_id, token_id])
            self._can_complete[token_id] = _BROKEN_CHARACTER in written or any(
                character in written for character in self._last_characters
            )
        return self._can_complete[token_id]

    def completed(self, response_ids: Sequence[int]) -> bool:
        """True where the response's text holds one of the texts. Meant to be asked after each token, so that the last
        one completed it."""
        if not self.can_complete(response_ids[-1]):
            return False
        written = self._decode(response_ids)
        return any(text in written for text in self._texts)


def stop_strings(sampling: Sampling, decode: Decode | None) -> StopStrings | None:
    """Those of `sampling`; None where it has none."""
    if not sampling.stop:
        return None
    assert decode is not None, "stop strings need a tokenizer's decode"
    return StopStrings(sampling.stop, decode)


def first_completed(stop: StopStrings, response_ids: Sequence[int]) -> int | None:
    """Return how many tokens there are up to and with the one that completes a text; None where none does."""
    lengths = (length for length in range(1, len(response_ids) + 1) if stop.completed(response_ids[:length]))
    return next(lengths, None)
