"""Ranked responses in the record of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.audit.recording.content import joined

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.content import WatchedBatch
    from training.utils.preference.batches import PreferenceBatch

OF_PAIRS = ("chosen", "rejected", "pair_weights", "margins")


def of_pairs(watched: Sequence[WatchedBatch], batches: Sequence[PreferenceBatch]) -> dict[str, torch.Tensor]:
    """The rows, the pairs, and which tokens are responses. `rows` are indices into the split."""
    first = [0, *accumulate(len(batch.row_B) for batch in batches)][:-1]

    def column(name: str, dtype: torch.dtype, begins: Sequence[int]) -> torch.Tensor:
        own = [getattr(batch.ranked, name).cpu() for batch in batches]
        return joined([values_Q + begin for values_Q, begin in zip(own, begins, strict=True)], dtype)

    masks: list[Any] = []
    for each, batch in zip(watched, batches, strict=True):
        lengths_B = each.sequences.lengths_S.tolist()
        for length, response in zip(lengths_B, batch.tokens_B.tolist(), strict=True):
            masks.append(torch.arange(length) >= length - response)
    return {
        "rows": joined([torch.from_numpy(batch.row_B) for batch in batches], torch.int64),
        "data_mask": joined(masks, torch.bool),
        "chosen": column("better_Q", torch.int64, first),
        "rejected": column("worse_Q", torch.int64, first),
        "pair_weights": column("weight_Q", torch.float32, [0] * len(first)),
        "margins": joined([batch.margin_Q for batch in batches], torch.float32),
    }
