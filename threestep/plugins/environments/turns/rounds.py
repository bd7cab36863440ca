"""Turns of conversations by any engine: all that wait are drawn together, and each reads its conversation so far."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from training.utils.contracts.drawing import DrawnTurn, NextTurn, Turns
from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, Sampling, rolled_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rounds(Turns):
    """Each `advance` draws all turns that were added."""

    in_rounds = True

    def __init__(
        self, engine: RolloutEngine, model: PreTrainedModel, sampling: Sampling, samples: int, *, device: torch.device
    ) -> None:
        """samples: neighbours of the first round whose tokens are one prompt."""
        self._engine, self._model, self._sampling, self._device = engine, model, sampling, device
        self._samples = samples
        self._added: list[NextTurn] = []

    @property
    def is_drawing(self) -> bool:
        return bool(self._added)

    def add(self, turn: NextTurn) -> None:
        self._added.append(turn)

    def advance(self) -> list[DrawnTurn]:
        turns, samples = self._added, self._samples
        self._added, self._samples = [], 1
        sampling = replace(self._sampling, max_new_tokens=max(turn.most_tokens for turn in turns))
        prompts = [torch.tensor(turn.ids) for turn in turns[::samples]]
        width = max(map(len, prompts))
        ids_BP = torch.full((len(prompts), width), sampling.pad_token_id)
        mask_BP = torch.zeros(ids_BP.shape, dtype=torch.bool)
        for row, ids in enumerate(prompts):
            ids_BP[row, width - len(ids) :], mask_BP[row, width - len(ids) :] = ids, True
        seeds = [turn.seed for turn in turns]
        request = RolloutRequest(ids_BP.to(self._device), mask_BP.to(self._device), sampling, seeds, samples)
        rollout = rolled_out(self._engine, self._model, request)
        logprobs_BR, ended, drawn = rollout.sampled_logprobs_BR.cpu(), rollout.ended_B.tolist(), []
        for row, turn in enumerate(turns):
            own, most = rollout.response_of(row).tolist(), turn.most_tokens
            logprobs = logprobs_BR[row, : min(len(own), most)].tolist()
            drawn.append(DrawnTurn(turn.key, own[:most], logprobs, ended[row] and len(own) <= most))
        return drawn
