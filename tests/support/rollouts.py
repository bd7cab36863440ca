"""Rollouts of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training.utils.contracts.rollout import Rollout


def rollout_of(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int = 0, **fields: Any
) -> Rollout:
    """Return a rollout of these ids; log-probabilities are 0 and all responses ended, where `fields` do not say it."""
    wide, long = max(map(len, prompts)), max(map(len, responses))
    given = {
        "prompt_ids_BP": torch.tensor([[pad] * (wide - len(ids)) + list(ids) for ids in prompts]),
        "prompt_mask_BP": torch.tensor([[False] * (wide - len(ids)) + [True] * len(ids) for ids in prompts]),
        "response_ids_BR": torch.tensor([list(ids) + [pad] * (long - len(ids)) for ids in responses]),
        "response_lengths_B": torch.tensor([len(ids) for ids in responses]),
        "sampled_logprobs_BR": torch.zeros(len(responses), long),
        "ended_B": torch.ones(len(responses), dtype=torch.bool),
    }
    return Rollout(**{**given, **fields})
