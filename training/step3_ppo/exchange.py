"""What ranks send each other, so that each computes as many tokens as the others, whatever it rolled out.

Everything travels as a few long arrays: pickled one by one, a thousand small tensors take longer than their forward.
r response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from training.utils.engine.collectives import gathered, several_ranks
from training.utils.layout.documents import TokenSequence
from training.utils.layout.rows import TokenRows

MicroBatch = tuple[list[int], TokenRows]  # indices of sequences in the order of the rows, and the rows
Packed = dict[str, Any]


def packed_sequences(sequences: Sequence[TokenSequence]) -> Packed:
    return {
        "lengths": [len(sequence) for sequence in sequences],
        "ids": _joined([sequence.input_ids for sequence in sequences], np.int64),
        "is_target": _joined([sequence.is_target for sequence in sequences], np.bool_),
    }


def unpacked_sequences(packed: Packed) -> list[TokenSequence]:
    ids = torch.from_numpy(packed["ids"]).split(packed["lengths"])
    is_target = torch.from_numpy(packed["is_target"]).split(packed["lengths"])
    return [TokenSequence(*pair) for pair in zip(ids, is_target, strict=True)]


def packed_values(parts: Sequence[torch.Tensor]) -> Packed:
    """Ragged values [r] of several sequences."""
    return {"lengths": [len(part) for part in parts], "values": _joined(parts, None)}


def unpacked_values(packed: Packed, device: torch.device) -> list[torch.Tensor]:
    return list(torch.from_numpy(packed["values"]).to(device).split(packed["lengths"]))


def read_balanced(
    own: Sequence[TokenSequence],
    rank: int,
    layout: Callable[[list[TokenSequence]], Sequence[MicroBatch]],
    read: Callable[[Sequence[int], TokenRows], dict[str, torch.Tensor]],
    count: Callable[[TokenSequence], int],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return what `read` gives for this rank's own sequences, one after the other. A collective.

    layout: this rank's share of everyone's sequences, rank after rank, as micro-batches. read: values of a micro-batch
    by name, `count` of them for each of its sequences, in their order; what comes behind them belongs to no sequence.
    """
    parts = gathered(packed_sequences(own)) if several_ranks() else None
    everyone = list(own) if parts is None else [each for part in parts for each in unpacked_sequences(part)]
    first = 0 if parts is None else sum(len(part["lengths"]) for part in parts[:rank])
    found: dict[str, dict[int, torch.Tensor]] = {}
    for chosen, rows in layout(everyone):
        sizes = [count(everyone[index]) for index in chosen]
        for name, values in read(chosen, rows).items():
            split = values[: sum(sizes)].split(sizes) if sizes else ()
            found.setdefault(name, {}).update(zip(chosen, split, strict=True))
    if parts is not None:
        found = _everyones(found, device)
    mine = range(first, first + len(own))
    return {name: torch.cat([values[index] for index in mine]) for name, values in found.items()}


def _everyones(found: dict[str, dict[int, torch.Tensor]], device: torch.device) -> dict[str, dict[int, torch.Tensor]]:
    sent = {name: (list(values), packed_values(list(values.values()))) for name, values in found.items()}
    everyone: dict[str, dict[int, torch.Tensor]] = {}
    for part in gathered(sent):
        for name, (indices, packed) in part.items():
            everyone.setdefault(name, {}).update(zip(indices, unpacked_values(packed, device), strict=True))
    return everyone


def _joined(parts: Sequence[torch.Tensor], dtype: Any) -> np.ndarray:
    if not parts:
        return np.empty(0, dtype or np.float32)
    return torch.cat([part.detach().reshape(-1) for part in parts]).cpu().numpy()
