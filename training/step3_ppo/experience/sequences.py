"""Sequences that ranks exchange: those of a rollout, so that all ranks compute nearly the same number of tokens, and
those of experiences, which minibatches mix.

Everything is sent as a few long arrays: pickling a thousand small tensors would take longer than their forward.
M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from training.step3_ppo.contracts.records import Experience, sequence_number
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.rows import span_numbers, spans_of
from training.utils.engine.ranks.collectives import gathered, several_ranks
from training.utils.layout.trie import rank_share

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import LearntValues
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.layout.trie import SequenceLayout


Packed = dict[str, Any]
# Micro-batches: the indices of their sequences, and their rows, not yet on the device.
Share = Sequence[tuple[Sequence[int], "TokenRows"]]
# Given a rollout, its rewards_BR and counts_B (as of Experience): the critic's part of learning.
LearnValues = Callable[["Rollout", torch.Tensor, torch.Tensor], "LearntValues"]
_TOKENS = ("input_ids", "is_target")  # of a TokenSequence


def packed_sequences(sequences: Sequence[TokenSequence]) -> Packed:
    columns = {name: packed_values([getattr(sequence, name) for sequence in sequences]) for name in _TOKENS}
    media = packed_values([torch.from_numpy(span_numbers(each.media)) for each in sequences])
    experts = [each.experts for each in sequences if each.experts is not None]
    assert len(experts) in (0, len(sequences)), "a rollout has the experts of all its sequences or of none"
    chosen = {"experts": packed_values(experts), "each": [each.shape for each in experts]}
    return {**columns, "media": media, "forks": [sequence.forks for sequence in sequences], **chosen}


def unpacked_sequences(packed: Packed) -> list[TokenSequence]:
    *columns, media = (unpacked_values(packed[name], torch.device("cpu")) for name in (*_TOKENS, "media"))
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


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence of an Experience, its fields without padding.

    number: among the rollout's on all ranks, the same for any number of ranks.
    counts: False if the response is left out of the loss.
    kept_r: bool, False where a rejected token is left out of the actor's; None if none is.
    """

    number: int
    tokens: TokenSequence
    counts: bool
    advantages_r: torch.Tensor
    old_logprobs_r: torch.Tensor | None
    ref_logprobs_r: torch.Tensor | None
    values_r: torch.Tensor | None
    returns_r: torch.Tensor | None
    weights_r: torch.Tensor | None
    kept_r: torch.Tensor | None = None


_FIELDS = ("advantages_r", "old_logprobs_r", "ref_logprobs_r", "values_r", "returns_r", "weights_r", "kept_r")


class TokenColumns:
    """The per-token fields of several sequences, concatenated in the order in which rows list their targets. A field
    that the experience lacks is None."""

    def __init__(self, sequences: Sequence[TrainingSequence], device: torch.device) -> None:
        nothing = torch.empty(0, device=device)

        def joined(name: str) -> torch.Tensor | None:
            parts = _parts(sequences, name)
            return None if parts is None else torch.cat([nothing, *parts])

        self.advantages_M = torch.cat([nothing, *(sequence.advantages_r for sequence in sequences)])
        self.counted_M = torch.cat(
            [nothing, *(torch.full_like(sequence.advantages_r, float(sequence.counts)) for sequence in sequences)]
        )
        self.old_logprobs_M = joined("old_logprobs_r")
        self.ref_logprobs_M = joined("ref_logprobs_r")
        self.values_M = joined("values_r")
        self.returns_M = joined("returns_r")
        self.weights_M = joined("weights_r")
        kept_M = joined("kept_r")
        self.actor_counted_M = self.counted_M if kept_M is None else self.counted_M * kept_M


def counted_by_the_actor(sequences: Sequence[TrainingSequence]) -> tuple[float, float]:
    """Return how many tokens the actor's loss counts, and sequences with such tokens."""
    tokens = [len(each.advantages_r) if each.kept_r is None else int(each.kept_r.sum()) for each in sequences]
    return float(sum(tokens)), float(sum(count > 0 for count in tokens))


def training_sequences(
    experiences: Sequence[Experience], samples_per_prompt: int, rank: int, world_size: int
) -> list[TrainingSequence]:
    """Cut this rank's experiences into their sequences."""
    sequences: list[TrainingSequence] = []
    for experience in experiences:
        lengths, counts = experience.rollout.drawn.lengths_B.tolist(), experience.counts_B.tolist()
        read = experience.read
        fields_BR = (
            experience.advantages_BR,
            experience.old_logprobs_BR,
            read.ref_logprobs_BR,
            read.values_BR,
            experience.returns_BR,
            *experience.corrected,
        )
        for index, (tokens, length) in enumerate(zip(experience.rollout.sequences(), lengths, strict=True)):
            number = sequence_number(rank, len(sequences), samples_per_prompt, world_size)
            fields_r: list[Any] = [None if field_BR is None else field_BR[index, :length] for field_BR in fields_BR]
            sequences.append(TrainingSequence(number, tokens, counts[index], *fields_r))
    return sequences


def sequences_of_all_ranks(mine: Sequence[TrainingSequence], device: torch.device) -> list[TrainingSequence]:
    """All ranks' sequences by their numbers: any number of ranks makes the same minibatches. A collective."""
    if not several_ranks():
        return list(mine)
    return sorted(
        (each for part in gathered(_packed(mine)) for each in _unpacked(part, device)), key=lambda each: each.number
    )


def _parts(sequences: Sequence[TrainingSequence], name: str) -> list[torch.Tensor] | None:
    parts = [getattr(sequence, name) for sequence in sequences]
    return None if any(part is None for part in parts) else parts


def _packed(sequences: Sequence[TrainingSequence]) -> Packed:
    fields = {name: _parts(sequences, name) for name in _FIELDS}
    return {
        "numbers": [sequence.number for sequence in sequences],
        "counts": [sequence.counts for sequence in sequences],
        "tokens": packed_sequences([sequence.tokens for sequence in sequences]),
        "fields": {name: packed_values(parts) for name, parts in fields.items() if parts is not None},
    }


def _unpacked(packed: Packed, device: torch.device) -> list[TrainingSequence]:
    nothing = [None] * len(packed["numbers"])
    fields = {name: unpacked_values(values, device) for name, values in packed["fields"].items()}
    columns = [fields.get(name, nothing) for name in _FIELDS]
    tokens = unpacked_sequences(packed["tokens"])
    return [TrainingSequence(*each) for each in zip(packed["numbers"], tokens, packed["counts"], *columns, strict=True)]
