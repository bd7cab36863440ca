"""Prompts are padded on the left, masks come from lengths; what a step's rows have in common."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, SentenceRow
from training.utils.data.rows.documents import collate_prompts, shared_share
from training.utils.layout.planner import PlanSettings


def row(*ids: int) -> SentenceRow:
    return SentenceRow(0, input_ids=np.array(ids), loss_mask=np.array([False, *[True] * (len(ids) - 1)]))


@pytest.mark.parametrize("least", [3, 6])
def test_the_share_that_equal_beginnings_spare(least):
    """Of three rows of 8 tokens, two begin with the same 5."""
    plan = PlanSettings(1, 100, 3, True, max_row_tokens=50, least_shared_tokens=least)
    rows = [row(1, 2, 3, 4, 5, 6, 7, 8), row(9, 8, 7, 6, 5, 4, 3, 2), row(1, 2, 3, 4, 5, 9, 9, 9)]
    assert shared_share(rows, plan) == pytest.approx(5 / 24 if least == 3 else 0.0, abs=1 / 24)


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


def test_what_cannot_be_padded():
    assert collate_prompts([prompt(1)], pad_token_id=0).prompt_ids_BP.tolist() == [[1]]  # 0 is a pad token
    with pytest.raises(ThreestepError, match="no pad token"):
        collate_prompts([prompt(1)], pad_token_id=None)
    with pytest.raises(ValueError, match="at least one row"):
        collate_prompts([], pad_token_id=0)
