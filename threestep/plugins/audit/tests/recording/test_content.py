"""What a record has of the micro-batches of a step."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.audit.recording.content import of_sequences
from threestep.plugins.audit.recording.sequences import RowSequences
from threestep.plugins.audit.step_recorder import WatchedBatch

pytestmark = pytest.mark.unit


def _batch(lengths: list[int], begins: list[int]) -> WatchedBatch:
    tokens = torch.arange(sum(lengths))
    media = {"media_begins": torch.tensor(begins), "media_tokens": torch.ones(len(begins), dtype=torch.int64)}
    sequences = RowSequences(torch.tensor(lengths), tokens, tokens[:0], media if begins else {})
    return WatchedBatch(sequences, None, torch.tensor(0.5))


def test_media_of_later_micro_batches_stand_behind_the_tokens_of_earlier_ones():
    """5 tokens with one medium, 4 without any, 3 with two, which begin at 9 + 0 and 9 + 2."""
    found = of_sequences([_batch([2, 3], [1]), _batch([4], []), _batch([3], [0, 2])])
    assert found["media_begins"].tolist() == [1, 9, 11]
    assert found["media_tokens"].tolist() == [1, 1, 1]
    assert found["micro_batches"].tolist() == [0, 0, 1, 2]
    assert "media_begins" not in of_sequences([_batch([4], [])])
