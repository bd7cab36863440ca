"""The experts of a mixture of experts by which the tokens of a rollout are computed, while they are drawn.

B sequences, of which A are still active; P prompt tokens, R response tokens, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from training.utils.contracts.documents import UNKNOWN
from training.utils.contracts.rollout import DrawnExperts

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest


class ExpertLog:
    """last: returns the experts of the last forward's slots, int16 [slots, L, K]."""

    def __init__(self, last: Callable[[], torch.Tensor], request: RolloutRequest) -> None:
        self._last, self._mask_BP = last, request.repeated()[1]
        self._prompts = len(request.prompt_ids_BP)
        self._most = request.sampling.max_new_tokens
        self._parts: list[torch.Tensor] = []

    def note_prompt_tokens(self) -> None:
        """The last forward was of the next tokens of all prompts."""
        own_tLK = self._last()
        self._parts.append(own_tLK.view(self._prompts, -1, *own_tLK.shape[1:]))

    def note_prompts(self, samples_per_prompt: int) -> None:
        """The prompts are read, each of which has so many samples."""
        own_BPLK = torch.cat(self._parts, dim=1)
        prompt_BPLK = own_BPLK.repeat_interleave(samples_per_prompt, dim=0)
        self._prompt_BPLK = prompt_BPLK.masked_fill(~self._mask_BP[..., None, None], UNKNOWN)
        self._response_BRLK = own_BPLK.new_full((len(self._mask_BP), self._most, *own_BPLK.shape[2:]), UNKNOWN)

    def note_tokens(self, rows_A: torch.Tensor, place: int) -> None:
        """The last forward was that of one response token of each of these rows, at `place` of the response."""
        self._response_BRLK[rows_A, place] = self._last()

    def drawn(self, rollout: Rollout) -> DrawnExperts:
        """Return the experts of a rollout. Whether a last token was read depends on others: it counts as not read."""
        width = rollout.response_ids_BR.shape[1]
        columns_R = torch.arange(width, device=rollout.response_lengths_B.device)
        is_unread_BR = columns_R >= rollout.response_lengths_B.unsqueeze(1) - 1
        response_BRLK = self._response_BRLK[:, :width].masked_fill(is_unread_BR[..., None, None], UNKNOWN)
        return DrawnExperts(self._prompt_BPLK, response_BRLK)
