"""Experiences are cut into sequences, whose fields are concatenated again for a micro-batch; sequences and values that
travel come back as they were, and each rank gets what belongs to its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.rollouts import rollout_of
from tests.support.step3_records import made_experience
from tests.support.thread_ranks import ThreadRanks
from training.step3_ppo.contracts.records import Experience
from training.step3_ppo.experience import sequences as exchange
from training.step3_ppo.experience.sequences import (
    TokenColumns,
    packed_sequences,
    packed_values,
    read_balanced,
    training_sequences,
    unpacked_sequences,
    unpacked_values,
)  # fmt: skip
from training.utils.contracts.documents import MediaSpan, TokenSequence
from training.utils.layout.rows import padded_rows

CPU = torch.device("cpu")


def experience(lengths: list[int], first: float) -> Experience:
    """Each field counts on from its own hundred, so that no two numbers are alike."""
    count, width = len(lengths), max(lengths)
    inside_BR = torch.arange(width) < torch.tensor(lengths)[:, None]
    fields = {
        name: (torch.arange(count * width).view(count, width) + first + 100.0 * place) * inside_BR
        for place, name in enumerate(
            ("old_logprobs_BR", "ref_logprobs_BR", "values_BR", "rewards_BR", "advantages_BR", "returns_BR")
        )
    }
    ids = [range(10 + row * width, 10 + row * width + length) for row, length in enumerate(lengths)]
    rollout = rollout_of([[5]] * count, ids, sampled_logprobs_BR=fields["old_logprobs_BR"])
    counts_B = torch.arange(count) != 1
    return made_experience(rollout=rollout, counts_B=counts_B, **fields)


def test_sequences_are_the_response_tokens_of_each_sequence():
    first, second = training_sequences([experience([2, 3], first=1.0)], 1, 0, 1)
    assert first.tokens.input_ids.tolist() == [5, 10, 11]
    assert second.tokens.input_ids.tolist() == [5, 13, 14, 15]
    assert first.old_logprobs_r.tolist() == [1.0, 2.0]
    assert second.ref_logprobs_r.tolist() == [104.0, 105.0, 106.0]
    assert second.values_r.tolist() == [204.0, 205.0, 206.0]
    assert second.advantages_r.tolist() == [404.0, 405.0, 406.0]
    assert first.returns_r.tolist() == [501.0, 502.0]
    assert (first.counts, second.counts) == (True, False)
    assert first.weights_r is None


def test_sequences_have_the_same_numbers_on_any_ranks():
    """Six prompts with two samples each, prompt p on rank p mod 3: sample s of prompt p has number 2 p + s."""
    numbers = [
        [each.number for each in training_sequences([experience([1, 1], 1.0), experience([1, 1], 1.0)], 2, rank, 3)]
        for rank in range(3)
    ]
    assert numbers == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_columns_follow_the_targets_of_the_rows():
    sequences = training_sequences([experience([2, 3, 1], first) for first in (1.0, 41.0)], 1, 0, 1)
    minibatch = [sequences[index] for index in (4, 0, 5)]
    rows = padded_rows([sequence.tokens for sequence in minibatch], 0)
    columns = TokenColumns(minibatch, CPU)
    # Token ids count from 10, log-probabilities from 1 or 41: each target meets its own number.
    shift = torch.tensor([41.0, 1.0, 41.0])[rows.sequence_M]
    assert torch.equal(columns.old_logprobs_M, (rows.target_ids_M - 10) + shift)
    assert torch.equal(columns.ref_logprobs_M, columns.old_logprobs_M + 100)
    assert torch.equal(columns.returns_M, columns.old_logprobs_M + 500)
    assert torch.equal(columns.advantages_M, columns.old_logprobs_M + 400)
    assert torch.equal(columns.values_M, columns.old_logprobs_M + 200)
    assert torch.equal(columns.counted_M, (rows.sequence_M != 0).float())
    assert columns.weights_M is None


def test_no_sequences():
    columns = TokenColumns([], CPU)
    assert columns.old_logprobs_M.shape == columns.returns_M.shape == columns.counted_M.shape == (0,)


def sequence(*ids: int) -> TokenSequence:
    """All but the first token are targets."""
    is_target = torch.ones(len(ids), dtype=torch.bool)
    is_target[0] = False
    return TokenSequence(torch.tensor(ids), is_target)


def test_experts_come_back_beside_the_tokens():
    given = [
        replace(sequence(5, 6, 7), experts=torch.arange(12, dtype=torch.int16).view(3, 2, 2)),
        replace(sequence(8), experts=torch.full((1, 2, 2), -1, dtype=torch.int16)),
    ]
    for before, after in zip(given, unpacked_sequences(packed_sequences(given)), strict=True):
        assert after.experts.dtype == torch.int16 and torch.equal(after.experts, before.experts)
        assert torch.equal(after.input_ids, before.input_ids)


def test_what_is_packed_comes_back():
    sequences = [sequence(1, 2, 3), sequence(4), sequence(5, 6)]
    back = unpacked_sequences(packed_sequences(sequences))
    for one, two in zip(sequences, back, strict=True):
        assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.is_target, two.is_target)
    values = [torch.tensor([0.5, 1.5]), torch.tensor([]), torch.tensor([2.5])]
    assert [part.tolist() for part in unpacked_values(packed_values(values), CPU)] == [[0.5, 1.5], [], [2.5]]
    spans = (MediaSpan(1, 2, (1, 2), key=7), MediaSpan(3, 1, key=300, sees_itself=True))
    pictured = [sequence(1, 2, 3, 4), replace(sequence(5, 6, 7, 8), media=spans), sequence(9)]
    assert [each.media for each in unpacked_sequences(packed_sequences(pictured))] == [(), spans, ()]
    parts = [sequence(1, 2, 3, 4), replace(sequence(5, 6, 7, 8), forks=(2, 3)), sequence(9)]
    assert [each.forks for each in unpacked_sequences(packed_sequences(parts))] == [(), (2, 3), ()]
    assert unpacked_sequences(packed_sequences([])) == [] and unpacked_values(packed_values([]), CPU) == []


OWN = [sequence(1, 2, 3), sequence(4, 5), sequence(6, 7, 8, 9), sequence(10, 11)]


@pytest.mark.parametrize(
    ("own", "computed", "wanted"),
    [
        # Rank 1 computes the second half of all, the last of them first.
        ([OWN[:3], OWN[3:]], [[[0, 1], []], [[3, 2], []]], [[20.0, 30.0, 50.0, 70.0, 80.0, 90.0], [110.0]]),
        ([OWN], [[[2, 0, 3, 1], []]], [[20.0, 30.0, 50.0, 70.0, 80.0, 90.0, 110.0]]),
        # Rank 1 has no sequence of its own and rank 0 computes nothing: both call what is collective.
        ([OWN[:2], []], [[[], []], [[], [0, 1]]], [[20.0, 30.0, 50.0], []]),
    ],
    ids=["two ranks", "one rank", "nothing of its own"],
)
def test_each_rank_gets_the_values_of_its_own_sequences(monkeypatch, own, computed, wanted):
    """computed: by each rank, the sequences of its micro-batches. A value is ten times a target's id."""
    ranks = ThreadRanks(len(own))
    monkeypatch.setattr(exchange, "gathered", ranks.gathered)
    monkeypatch.setattr(exchange, "several_ranks", lambda: len(own) > 1)

    def share(everyone, layout, device):
        assert [each.input_ids[0] for each in everyone] == [each.input_ids[0] for part in own for each in part]
        return [(indices, [everyone[index] for index in indices]) for indices in computed[layout.rank]]

    def read(shares):
        for _, rows in shares:
            ids = torch.cat([torch.empty(0), *(each.input_ids[each.is_target] for each in rows)])
            yield {"value": torch.cat([ids * 10, torch.tensor([-1.0])])}  # what comes behind belongs to none

    monkeypatch.setattr(exchange, "rank_share", share)

    def act(rank: int) -> list[float]:
        layout = SimpleNamespace(rank=rank)
        return read_balanced(own[rank], layout, read, count=exchange.targets_of, device=CPU)["value"].tolist()

    assert ranks.run(act) == wanted
