"""Experiences are cut into sequences, whose fields are concatenated again for a micro-batch."""

from __future__ import annotations

import torch

from tests.support.step3_records import made_experience
from training.step3_ppo.contracts.records import Experience
from training.step3_ppo.experience.sequences import TokenColumns, training_sequences
from training.utils.contracts.rollout import Rollout
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
    ids_BR = torch.arange(count * width).view(count, width) + 10
    rollout = Rollout(
        prompt_ids_BP=torch.tensor([[0, 5]] * count),
        prompt_mask_BP=torch.tensor([[False, True]] * count),
        response_ids_BR=ids_BR,
        response_lengths_B=torch.tensor(lengths),
        sampled_logprobs_BR=fields["old_logprobs_BR"],
        ended_B=torch.zeros(count, dtype=torch.bool),
    )
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
        [
            sequence.number
            for sequence in training_sequences([experience([1, 1], 1.0), experience([1, 1], 1.0)], 2, rank, 3)
        ]
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
