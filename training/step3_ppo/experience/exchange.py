"""The exchange of sequences between ranks, so that all compute nearly the same number of tokens.

Everything is sent as a few long arrays: pickling a thousand small tensors would take longer than their forward.
r response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.media_numbers import span_numbers, spans_of
from training.utils.engine.ranks.collectives import gathered, several_ranks
from training.utils.layout.rank_share import rank_share

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import LearntValues
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.layout.rank_share import SequenceLayout

Packed = dict[str, Any]
# Micro-batches: the indices of their sequences, and their rows, not yet on the device.
Share = Sequence[tuple[Sequence[int], "TokenRows"]]
# Given a rollout, its rewards_BR and counts_B (as of Experience): the critic's part of learning.
LearnValues = Callable[["Rollout", torch.Tensor, torch.Tensor], "LearntValues"]
_FIELDS = ("input_ids", "is_target")  # of a TokenSequence


def packed_sequences(sequences: Sequence[TokenSequence]) -> Packed:
    columns = {name: packed_values([getattr(sequence, name) for sequence in sequences]) for name in _FIELDS}
    media = packed_values([torch.from_numpy(span_numbers(each.media)) for each in sequences])
    experts = [each.experts for each in sequences if each.experts is not None]
    assert len(experts) in (0, len(sequences)), "the experts of all sequences of a rollout are known, or of none"
    chosen = {"experts": packed_values(experts), "each": [each.shape for each in experts]}
    return {**columns, "media": media, "forks": [sequence.forks for sequence in sequences], **chosen}


def unpacked_sequences(packed: Packed) -> list[TokenSequence]:
    *columns, media = (unpacked_values(packed[name], torch.device("cpu")) for name in (*_FIELDS, "media"))
    spans = [spans_of(numbers.numpy()) for numbers in media]
    experts: list[torch.Tensor | None] = [None] * len(spans)
    if packed["each"]:
        values = unpacked_values(packed["experts"], torch.device("cpu"))
        experts = [own.view(shape) for own, shape in zip(values, packed["each"], strict=True)]
    return [TokenSequence(*each) for each in zip(*columns, spans, packed["forks"], experts, strict=True)]


def packed_values(parts: Sequence[torch.Tensor]) -> Packed:
    """Ragged values [r] of several sequences."""
    values = torch.cat([part.detach().reshape(-1) for part in parts]) if parts else torch.empty(0)
    return {"lengths": [part.numel() for part in parts], "values": values.cpu().numpy()}


def unpacked_values(packed: Packed, device: torch.device) -> list[torch.Tensor]:
    return list(torch.from_numpy(packed["values"]).to(device).split(packed["lengths"]))


def read_balanced(
    sequences: Sequence[TokenSequence],
    layout: SequenceLayout,
    read: Callable[[Share], Iterable[dict[str, torch.Tensor]]],
    *,
    count: Callable[[TokenSequence], int],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return the values that `read` yields for this rank's sequences, concatenated. A collective.

    read: yields values of each micro-batch by name, `count` for each of its sequences in order; any further values
        belong to no sequence. The indices of the sequences count through all ranks'.
    """
    parts = [list(sequences)]
    if several_ranks():
        parts = [unpacked_sequences(part) for part in gathered(packed_sequences(sequences))]
    all_ranks = [sequence for part in parts for sequence in part]
    first = sum(len(part) for part in parts[: layout.rank])
    share = list(rank_share(all_ranks, layout, device))
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for (indices, _), found in zip(share, read(share), strict=True):
        sizes = [count(all_ranks[index]) for index in indices]
        for name, values in found.items():
            split = values[: sum(sizes)].split(sizes) if sizes else ()
            by_name.setdefault(name, {}).update(zip(indices, split, strict=True))
    if several_ranks():
        by_name = _from_all_ranks(by_name, device)
    mine = range(first, first + len(sequences))
    # A rank without sequences gets nothing, of the same type.
    return {
        name: torch.cat([next(iter(values.values())).new_empty(0), *(values[index] for index in mine)])
        for name, values in by_name.items()
    }


def targets_of(sequence: TokenSequence) -> int:
    """Return how many of its tokens are to be predicted."""
    return int(sequence.is_target.sum())


def of_all_ranks(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return ragged values [r] of all ranks' sequences, in the order of their indices. A collective."""
    if not several_ranks():
        return list(parts)
    return [values for part in gathered(packed_values(parts)) for values in unpacked_values(part, device)]


def _from_all_ranks(
    mine: dict[str, dict[int, torch.Tensor]], device: torch.device
) -> dict[str, dict[int, torch.Tensor]]:
    sent = {name: (list(values), packed_values(list(values.values()))) for name, values in mine.items()}
    all_ranks: dict[str, dict[int, torch.Tensor]] = {}
    for part in gathered(sent):
        for name, (indices, packed) in part.items():
            all_ranks.setdefault(name, {}).update(zip(indices, unpacked_values(packed, device), strict=True))
    return all_ranks
