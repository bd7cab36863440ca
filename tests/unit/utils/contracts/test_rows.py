"""The records count their own tokens and are not to be written to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow, TextBlock


def test_lengths_count_every_token():
    ids = np.arange(4, dtype=np.int32)
    assert SentenceRow(0, ids, ids > 1).length_tokens == 4
    assert ResponsesRow(0, ids, (ids[:1], ids[:3])).length_tokens == 8
    assert PromptRow(0, ids, "", None).length_tokens == 4
    assert TextBlock(0, ids).length_tokens == 4


def test_a_prompts_uid_is_of_its_text_and_reference_alone():
    def uid(text, reference=None, row_id=0, **columns):
        return PromptRow(row_id, np.arange(4, dtype=np.int32), text, reference, columns).uid

    assert uid("a", "1") == uid("a", "1", 7, data_source="x") and len(uid("a")) == 16
    assert len({uid("a"), uid("b"), uid("a", "1"), uid("a", 1), uid("a", [1])}) == 5
    assert uid("a", {"x": 1, "y": 2}) == uid("a", {"y": 2, "x": 1})
    # Written down once: what a saved sampler knows by uid must be found again by later releases.
    assert uid("Human: 2 + 3? Assistant:", "5") == "1641188edb45732e"


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TextBlock(0, np.zeros(1, np.int32)).row_id = 1  # type: ignore[misc]
