"""Ranks share sequences of which some have images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from training.utils.contracts.documents import MediaSpan, join, plain
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share

CPU, PAD = torch.device("cpu"), 2


@pytest.mark.parametrize("packed", [True, False])
def test_a_rank_without_images_gets_one_where_another_has_some(packed):
    """Three samples of a prompt with an image, one in a forward beside a text: rows have its pixels once for each
    document, and the image that is added is no sequence."""
    spans = (MediaSpan(1, 2, (1, 2), key=5),)
    samples = [replace(join(torch.arange(4), torch.arange(3) + 50 + own), media=spans) for own in range(3)]
    texts = [join(torch.arange(6) + 10, torch.arange(2) + 60)]
    images = RowImages(lambda keys: ImagePixels(torch.tensor(keys)[:, None]), (plain(samples[0]),))
    plan = PlanSettings(2, 13, 8, True, 13) if packed else PlanSettings(2, max_rows_per_micro_batch=2)
    shares = [rank_share([*samples, *texts], SequenceLayout(plan, PAD, rank, images), CPU) for rank in range(2)]
    assert sorted(index for laid in shares for indices, _ in laid for index in indices) == [0, 1, 2, 3]
    added = 0
    for laid in zip(*shares, strict=True):
        assert len({rows.media is not None for _, rows in laid}) == 1
        for indices, rows in laid:
            own = sum(index < 3 for index in indices)
            documents = min(own, 1) if packed else own
            added += rows.media is not None and not own
            assert len(rows.end_B) == len(indices) and (rows.media is not None or not documents)
            if rows.media is not None:
                assert len(rows.media.spans) == max(documents, 1)
                assert rows.media.read.values.flatten().tolist() == [5] * len(rows.media.spans)
    assert added == (1 if packed else 0)
