"""The experts of a mixture of experts by which the tokens of a rollout are computed, while they are drawn.

B sequences, of which A are still active; P prompt tokens, R response tokens, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import UNKNOWN
from training.utils.contracts.guests import TokenLog
from training.utils.contracts.rollout import DrawnExperts
from training.utils.generation.decoding.decoding import MASKED, NONE, DecodeWay

if TYPE_CHECKING:
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest


class ExpertLog(TokenLog):
    """last: returns the experts of the last forward's slots, int16 [slots, L, K]."""

    def __init__(self, last: Callable[[], torch.Tensor], request: RolloutRequest) -> None:
        self._last, self._mask_BP = last, request.repeated()[1]
        self._prompts = len(request.prompt_ids_BP)
        self._samples, self._most = request.samples_per_prompt, request.sampling.max_new_tokens
        self._parts: list[torch.Tensor] = []

    def note_prompt_tokens(self) -> None:
        own_tLK = self._last()
        self._parts.append(own_tLK.view(self._prompts, -1, *own_tLK.shape[1:]))

    def note_tokens(self, rows_A: torch.Tensor, place: int) -> None:
        self._response_BRLK[rows_A, place] = self._last()

    @cached_property
    def _prompt_BPLK(self) -> torch.Tensor:
        """Once the prompts are read."""
        own_BPLK = torch.cat(self._parts, dim=1).repeat_interleave(self._samples, dim=0)
        return own_BPLK.masked_fill(~self._mask_BP[..., None, None], UNKNOWN)

    @cached_property
    def _response_BRLK(self) -> torch.Tensor:
        return self._prompt_BPLK.new_full((len(self._mask_BP), self._most, *self._prompt_BPLK.shape[2:]), UNKNOWN)

    def added_to(self, rollout: Rollout) -> Rollout:
        """Return it with `experts`. Whether a last token was read depends on others: it counts as not read."""
        width = rollout.response_ids_BR.shape[1]
        columns_R = torch.arange(width, device=rollout.response_lengths_B.device)
        is_unread_BR = columns_R >= rollout.response_lengths_B.unsqueeze(1) - 1
        response_BRLK = self._response_BRLK[:, :width].masked_fill(is_unread_BR[..., None, None], UNKNOWN)
        return replace(rollout, experts=DrawnExperts(self._prompt_BPLK, response_BRLK))


def recording_way(way: DecodeWay, name: str) -> DecodeWay:
    """Return how the model `name`, which decodes in `way`, does so while its experts are recorded: captured graphs run
    no code of ours. ThreestepError where it decodes prompts of one length at a time."""
    if not way.padded or way.cache == NONE:
        raise ThreestepError(
            f"--replay_routers needs batches with prompts of different lengths, but {name} generates {way.words}; "
            "leave --replay_routers out, or use another --rollout_engine"
        )
    return MASKED if way.fixed else way
