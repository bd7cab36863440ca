"""Prompts are padded on the right while flipped, so the batch is left-padded; masks come from lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.data.rows.documents import collate_prompts


def prompt(*ids: int) -> PromptRow:
    return PromptRow(0, np.array(ids[::-1], np.int32), "text", None)


def test_left_padded_to_the_longest():
    batch = collate_prompts([prompt(5, 6, 7), prompt(8)], pad_token_id=0)
    assert batch.prompt_ids_BP.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.prompt_mask_BP.tolist() == [[True, True, True], [False, False, True]]
    assert batch.prompt_ids_BP.dtype == torch.int64 and batch.prompt_mask_BP.dtype == torch.bool
    assert [row.prompt_text for row in batch.rows] == ["text", "text"]


def test_a_pad_id_inside_a_prompt_counts():
    # pad is eos, and a prompt may hold eos at its beginning, middle and end: they are all its own tokens.
    batch = collate_prompts([prompt(9, 5, 9, 9), prompt(9)], pad_token_id=9)
    assert batch.prompt_mask_BP.tolist() == [[True] * 4, [False, False, False, True]]


def test_no_pad_token_is_one_clear_error():
    with pytest.raises(ThreestepError, match="no pad token"):
        collate_prompts([prompt(1)], pad_token_id=None)


def test_pad_id_zero_is_a_pad_token():
    assert collate_prompts([prompt(1)], pad_token_id=0).prompt_ids_BP.tolist() == [[1]]


def test_no_rows_is_our_own_mistake():
    with pytest.raises(ValueError, match="at least one row"):
        collate_prompts([], pad_token_id=0)
