"""Inputs of the forward of a batch of prompts beside their tokens: positions, and of prompts with media what the model
reads of these.

B prompts, P tokens.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.rollout_engine import RolloutRequest


@dataclass(frozen=True)
class PromptInputs:
    """position_ids: int64 [B, P], or [3, B, P] where a medium counts by its sides (M-RoPE).
    last_B1: int64, one less than the position of the token behind each prompt.
    of_media: further arguments of the forward.
    """

    position_ids: torch.Tensor
    last_B1: torch.Tensor
    of_media: dict[str, Any] = field(default_factory=dict)


def prompt_inputs(model: Any, request: RolloutRequest, accepted: Container[str]) -> PromptInputs:
    """accepted: names of the arguments of the model's forward."""
    mask_BP, media = request.prompt_mask_BP, request.media
    position_ids_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    if media is None or not any(media.spans):
        return PromptInputs(position_ids_BP, position_ids_BP[:, -1:])
    taken_B1, by_sides = media.positions(mask_BP)
    of_media = media.forward_kwargs(model, mask_BP, accepted)
    return PromptInputs(position_ids_BP if by_sides is None else by_sides, taken_B1 - 1, of_media)
