"""Experiences cut into sequences that minibatches mix, and exchanged between ranks.

M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from training.step3_ppo.contracts.records import Experience, sequence_number
from training.step3_ppo.experience.exchange import (
    Packed,
    packed_sequences,
    packed_values,
    unpacked_sequences,
    unpacked_values,
)
from training.utils.engine.ranks.collectives import gathered, several_ranks

if TYPE_CHECKING:
    from training.utils.contracts.documents import TokenSequence


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
    """Return all ranks' sequences in the order of their numbers: any number of ranks makes the same minibatches. A
    collective."""
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
