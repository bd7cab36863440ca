"""Inputs of the forward of a batch of prompts beside their tokens: positions, and of prompts with images
what the tower reads.

The family makes the mask, as for prompts of text: of images whose tokens all see each other (Gemma 3) it is told which
these are.

B prompts, P tokens.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from training.utils.images.inputs import image_inputs
from training.utils.images.spans import left_padded_axes, positions_taken

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.images.prompts import PromptImages

_SEES_ITSELF = "token_type_ids"  # 1 where a token is of an image that sees itself (Gemma 3, transformers 5.19)


@dataclass(frozen=True)
class PromptInputs:
    """position_ids: int64 [B, P], or [3, B, P] where an image counts by its sides (M-RoPE).
    last_B1: int64, one less than the position of the token behind each prompt.
    of_images: further arguments of the forward.
    """

    position_ids: torch.Tensor
    last_B1: torch.Tensor
    of_images: dict[str, Any] = field(default_factory=dict)


def prompt_inputs(model: Any, request: RolloutRequest, accepted: Container[str]) -> PromptInputs:
    """accepted: names of the arguments of the model's forward."""
    mask_BP, images = request.prompt_mask_BP, request.media
    position_ids_BP = (mask_BP.long().cumsum(-1) - 1).clamp(min=0)
    if images is None or not any(images.spans):
        return PromptInputs(position_ids_BP, position_ids_BP[:, -1:])
    lengths = mask_BP.sum(1).tolist()
    taken = [positions_taken(length, own) for length, own in zip(lengths, images.spans, strict=True)]
    last_B1 = torch.tensor(taken, device=mask_BP.device).unsqueeze(1) - 1
    position_ids = position_ids_BP
    if any(image.sides for own in images.spans for image in own):
        position_ids = left_padded_axes(mask_BP, images.spans)
    return PromptInputs(position_ids, last_B1, _of_images(model, mask_BP, images, accepted))


def _of_images(model: Any, mask_BP: torch.Tensor, images: PromptImages, accepted: Container[str]) -> dict[str, Any]:
    device, width = mask_BP.device, mask_BP.shape[1]
    given = image_inputs(model, images.pixels, device)
    if _SEES_ITSELF in accepted:
        types_BP = torch.zeros(mask_BP.shape, dtype=torch.int64)
        for row, (length, own) in enumerate(zip(mask_BP.sum(1).tolist(), images.spans, strict=True)):
            for image in own:
                first = width - length + image.begin
                types_BP[row, first : first + image.tokens] = image.sees_itself
        given[_SEES_ITSELF] = types_BP.to(device)
    return given
