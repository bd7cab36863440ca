"""Watched micro-batches as the tensors of a record that every step has.

K micro-batches of a rank, S sequences, T tokens, M tokens to be predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.utils.recording.recorder import WatchedBatch


def of_sequences(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """The sequences of this rank, their tokens, their micro-batches and the parts of the loss."""
    counts = [len(each.sequences.lengths_S) for each in watched]
    return {
        "lengths": joined([each.sequences.lengths_S for each in watched], torch.int64),
        "token_ids": joined([each.sequences.token_ids_T for each in watched], torch.int64),
        "micro_batches": torch.arange(len(watched)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)),
        "micro_losses": joined([each.loss.cpu().reshape(1) for each in watched], torch.float32),
        **_media(watched),
    }


def _media(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """Media that the model read, as a record has them; nothing where it read none."""
    begins = accumulate((len(each.sequences.token_ids_T) for each in watched), initial=0)
    found: dict[str, list[torch.Tensor]] = {}
    for begin, each in zip(begins, watched, strict=False):
        for name, values in each.sequences.media.items():
            found.setdefault(name, []).append(values + begin if name == "media_begins" else values)
    return {name: torch.cat(parts) for name, parts in found.items()}


def of_targets(watched: Sequence[WatchedBatch]) -> dict[str, torch.Tensor]:
    """`loss_mask`, and `logprobs` if every micro-batch's were read."""
    ones = [each.sequences.spread(torch.ones(len(each.sequences.place_M))) for each in watched]
    found = {"loss_mask": joined(ones, torch.float32) > 0}
    reads = [each.read for each in watched if each.read is not None]
    return {**found, "logprobs": spread(watched, reads)} if len(reads) == len(watched) else found


def spread(watched: Sequence[WatchedBatch], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [T] from each micro-batch's [M]."""
    return joined([each.sequences.spread(own) for each, own in zip(watched, values, strict=True)], torch.float32)


def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate what may be nothing, on the CPU; float64 stays float64."""
    whole = torch.cat([torch.zeros(0, dtype=dtype), *(part.detach().cpu() for part in parts)])
    return whole if whole.dtype == torch.float64 else whole.to(dtype)


def step_figures(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    """`grad_norm` and `learning_rate` from an engine's figures, named GROUP/..."""
    names = ("grad_norm", "learning_rate")
    return {name: figures[f"{group}/{name}"] for name in names if f"{group}/{name}" in figures}
