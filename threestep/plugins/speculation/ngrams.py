"""Guesses without a head: what came after the last tokens of a row when they came before (prompt lookup, an n-gram
draft).

The samples of a prompt share a table: what one of them has drawn is a guess for the others. On the host.

A rows (B prompts with n samples each, until some leave), Q tokens, K guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.generation.decoding.cache import Moves

NOTHING = -1  # where a row has no guess; not a token
# So many last tokens are looked up, the longest first.
_SIZES = (3, 2)
# All rows compute as many tokens as the one with the most guesses: too few rows with a guess do not pay for the others.
_LEAST_SHARE = 0.25


class NgramRows:
    """The rows of a rollout: the last tokens of each, and the table of its prompt."""

    def __init__(self, request: RolloutRequest, guesses: int) -> None:
        """guesses: K."""
        self._guesses = guesses
        self._rows: list[_Row] = []
        for ids_P, mask_P in zip(request.prompt_ids_BP, request.prompt_mask_BP, strict=True):
            prompt = _Row([], {})
            for token in ids_P[mask_P].tolist():
                prompt.append(token)
            self._rows += [_Row(list(prompt.last), prompt.followers) for _ in range(request.samples_per_prompt)]

    def leave(self, moves: Moves) -> None:
        """Drop rows."""
        self._rows = [self._rows[row] for row in moves.order.tolist()]

    def guess(self, token_AQ: torch.Tensor, fresh_A: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return the next tokens [A, <= K] of each row, NOTHING from the first on that is not known. token_AQ: of which
        the first `fresh_A` are new. What a head reads besides is not needed."""
        self.skip(token_AQ, fresh_A)
        found = [row.next_tokens(self._guesses) for row in self._rows]
        if sum(map(bool, found)) < _LEAST_SHARE * len(found):
            return token_AQ[:, :0]
        width = max(map(len, found))
        return torch.tensor([[*ids, *[NOTHING] * (width - len(ids))] for ids in found], device=token_AQ.device)

    def skip(self, token_AQ: torch.Tensor, fresh_A: torch.Tensor) -> None:
        """Note these tokens and guess nothing."""
        for row, fresh, tokens in zip(self._rows, fresh_A.tolist(), token_AQ.tolist(), strict=True):
            for token in tokens[:fresh]:
                row.append(token)


class _Row:
    """last: the last tokens. followers: by some tokens, the one that followed them last; shared with other rows."""

    def __init__(self, last: list[int], followers: dict[tuple[int, ...], int]) -> None:
        self.last, self.followers = last, followers

    def append(self, token: int) -> None:
        for size in _SIZES:
            if len(self.last) >= size:
                self.followers[tuple(self.last[-size:])] = token
        self.last = [*self.last, token][-_SIZES[0] :]

    def next_tokens(self, most: int) -> list[int]:
        """Guess up to `most` tokens, each behind the last."""
        last, found = self.last, list[int]()
        while len(found) < most:
            keys = (tuple(last[-size:]) for size in _SIZES if len(last) >= size)
            token = next((self.followers[key] for key in keys if key in self.followers), None)
            if token is None:
                break
            found.append(token)
            last = [*last, token][-_SIZES[0] :]
        return found
