"""What a rollout engine promises. Another engine is another file with this one class.

B prompts, of which each gets n responses next to each other: B * n sequences. P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from training.step3_ppo.records import Rollout
from training.utils.engine.whole_model import WholeModel

# Token ids -> text, as samples and rewards read it. Engines need it for stop strings alone.
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: what the configuration says and nothing else (a model's own generation settings are
    not read).

    temperature: 0 draws the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    bad_words: token sequences that are never completed. stop: texts; a response ends with the token that completes
    one of them.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    end_token_id: int
    pad_token_id: int
    min_p: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()


def repeated(
    prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor, samples_per_prompt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each sample of a prompt: ids and mask."""
    return (
        prompt_ids_BP.repeat_interleave(samples_per_prompt, dim=0),
        prompt_mask_BP.repeat_interleave(samples_per_prompt, dim=0),
    )


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
        samples_per_prompt: int = 1,
    ) -> Rollout:
        """Return `samples_per_prompt` responses to each prompt, those of one prompt adjacent; `seeds` has one for each
        of these sequences. A response depends on its prompt and its own seed alone, whatever else is in the batch.
        `model` is what `lent` gave, or any model with whole (unsharded) weights in eval mode."""

    @contextlib.contextmanager
    def lent(self, actor: WholeModel) -> Iterator[PreTrainedModel]:
        """Inside, the engine draws from the trained model's present weights. Every rank must enter together."""
        with actor.lent() as model:
            yield model

    def figures(self) -> dict[str, float]:
        """What there is to tell of the rollouts since this was last asked, as metrics."""
        return {}

    def state_dict(self) -> dict[str, int]:
        """What rollouts change here, the same on every rank; empty where nothing does."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:  # noqa: B027 (most have none)
        """Take up what `state_dict` gave."""
