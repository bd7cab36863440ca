"""Experiences are cut into sequences, and put together again for a minibatch."""

from __future__ import annotations

import torch

from training.step3_ppo.records import Experience, Rollout
from training.step3_ppo.trainer import Columns, pieces_of
from training.utils.layout.rows import padded_rows


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
    return Experience(rollout=rollout, scores_B=torch.zeros(count), **fields)


def test_pieces_are_the_response_tokens_of_each_sequence():
    made = experience([2, 3], first=1.0)
    first, second = pieces_of(made)
    assert first.sequence.input_ids.tolist() == [5, 10, 11]
    assert second.sequence.input_ids.tolist() == [5, 13, 14, 15]
    assert first.old_logprobs_r.tolist() == [1.0, 2.0]
    assert second.values_r.tolist() == [204.0, 205.0, 206.0]
    assert second.advantages_r.tolist() == [404.0, 405.0, 406.0]
    assert first.returns_r.tolist() == [501.0, 502.0]


def test_columns_follow_the_targets_of_the_rows():
    pieces = [piece for first in (1.0, 41.0) for piece in pieces_of(experience([2, 3, 1], first))]
    minibatch = [pieces[index] for index in (4, 0, 5)]
    rows = padded_rows([piece.sequence for piece in minibatch], 0)
    columns = Columns(minibatch, torch.device("cpu"))
    # Token ids count from 10, log-probabilities from 1 or 41: each target meets its own number.
    shift = torch.tensor([41.0, 1.0, 41.0])[rows.sequence_M]
    assert torch.equal(columns.old_logprobs_M, (rows.target_ids_M - 10) + shift)
    assert torch.equal(columns.returns_M, columns.old_logprobs_M + 500)
    assert torch.equal(columns.advantages_M, columns.old_logprobs_M + 400)
    assert torch.equal(columns.values_M, columns.old_logprobs_M + 200)


def test_no_pieces():
    columns = Columns([], torch.device("cpu"))
    assert columns.old_logprobs_M.shape == columns.returns_M.shape == (0,)
