"""Prompts of phase 3 become one left-padded batch.

The other phases are laid out by `training.utils.layout`. Masks come from lengths, never from ids: pad may be eos.

Shape suffixes: B sequences, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from training.utils.data.rows.tokenize import require_pad_token

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Left-padded prompts.

    prompt_ids_BP: int64.
    prompt_mask_BP: bool, True on the prompt's tokens, False on padding.
    rows: the B rows, in order.

    Worked example, prompts (5, 6, 7) and (8,), pad 0:
    prompt_ids_BP ((5, 6, 7), (0, 0, 8)), prompt_mask_BP ((T, T, T), (F, F, T)).
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    rows: tuple[PromptRow, ...]


def collate_prompts(rows: Sequence[PromptRow], pad_token_id: int | None) -> PromptBatch:
    """Left-pad prompts to the longest. Raises ThreestepError without a pad token, ValueError without rows."""
    pad = require_pad_token(pad_token_id, "a batch of prompts")
    if not rows:
        raise ValueError("a batch of prompts needs at least one row, got none")
    flipped = [torch.tensor(row.flipped_prompt_ids, dtype=torch.int64) for row in rows]
    ids_BP = pad_sequence(flipped, batch_first=True, padding_value=pad).flip(1)
    mask_BP = pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in flipped], batch_first=True).flip(1)
    return PromptBatch(prompt_ids_BP=ids_BP, prompt_mask_BP=mask_BP, rows=tuple(rows))
