"""Prompts of phase 3 become one left-padded batch.

The other phases are laid out by `training.utils.layout`. Masks come from lengths, never from ids: pad may
be eos.

Shape suffixes: B sequences, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.utils.data.phases import PromptRow
from training.utils.run.errors import ThreestepError


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Left-padded prompts.

    `prompt_ids_BP`: int64; `prompt_mask_BP`: bool, True on the prompt's own tokens; `rows`: the B rows, in
    order.

    Worked example, prompts (5, 6, 7) and (8,), pad 0:
    prompt_ids_BP ((5, 6, 7), (0, 0, 8)), prompt_mask_BP ((T, T, T), (F, F, T)).
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    rows: tuple[PromptRow, ...]


def collate_prompts(rows: Sequence[PromptRow], pad_token_id: int | None) -> PromptBatch:
    """Pad the flipped ids on the right and flip the batch back: left-padded, as wide as its longest prompt.

    Raises ThreestepError where there is no pad token, ValueError where there are no rows.
    """
    if pad_token_id is None:
        raise ThreestepError(
            "prompts of different lengths need padding and the tokenizer has no pad token: give it one "
            "and save it, for instance tokenizer.pad_token = tokenizer.eos_token (masks come from "
            "lengths, so any id serves)"
        )
    if not rows:
        raise ValueError("a batch of prompts needs at least one row, got none")
    width = max(len(row.flipped_prompt_ids) for row in rows)
    flipped_ids_BP = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    flipped_mask_BP = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.flipped_prompt_ids)
        flipped_ids_BP[index, :length] = torch.tensor(row.flipped_prompt_ids, dtype=torch.int64)
        flipped_mask_BP[index, :length] = True
    return PromptBatch(prompt_ids_BP=flipped_ids_BP.flip(1), prompt_mask_BP=flipped_mask_BP.flip(1), rows=tuple(rows))
