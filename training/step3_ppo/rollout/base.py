"""What a rollout engine promises. Another engine is another file with this one class.

B sequences, P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from training.step3_ppo.records import Rollout


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: what the configuration says and nothing else (a model's own generation settings are
    not read).

    temperature: 0 draws the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    end_token_id: int
    pad_token_id: int


class RolloutEngine(ABC):
    """Draws responses from a model's present weights."""

    @abstractmethod
    def roll_out(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Rollout:
        """Return one response a prompt. The response to a prompt depends on its own seed alone, whatever else is
        in the batch. `model` holds whole (unsharded) weights and is in eval mode."""
