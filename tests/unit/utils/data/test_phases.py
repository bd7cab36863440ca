"""The records count their own tokens and are not to be written to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from training.utils.data.phases import PromptRow, ResponsesRow, SentenceRow, TextBlock


def test_lengths_count_every_token():
    ids = np.arange(4, dtype=np.int32)
    assert SentenceRow(0, ids, ids > 1).length_tokens == 4
    assert ResponsesRow(0, ids, (ids[:1], ids[:3])).length_tokens == 8
    assert PromptRow(0, ids, "", None).length_tokens == 4
    assert TextBlock(0, ids).length_tokens == 4


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TextBlock(0, np.zeros(1, np.int32)).row_id = 1  # type: ignore[misc]
