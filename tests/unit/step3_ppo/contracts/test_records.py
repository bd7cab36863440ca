"""A rollout's masks and parts come from lengths."""

from __future__ import annotations

import torch

from training.utils.contracts.rollout import Rollout


def test_the_worked_example():
    rollout = Rollout(
        prompt_ids_BP=torch.tensor([[5, 6, 7], [0, 0, 8]]),
        prompt_mask_BP=torch.tensor([[True, True, True], [False, False, True]]),
        response_ids_BR=torch.tensor([[4, 9, 0], [3, 3, 3]]),
        response_lengths_B=torch.tensor([2, 3]),
        sampled_logprobs_BR=torch.zeros(2, 3),
        ended_B=torch.tensor([True, False]),
    )
    assert rollout.response_mask_BR.tolist() == [[True, True, False], [True, True, True]]
    assert [rollout.prompt_of(index).tolist() for index in range(2)] == [[5, 6, 7], [8]]
    assert [rollout.response_of(index).tolist() for index in range(2)] == [[4, 9], [3, 3, 3]]


def test_pad_may_be_the_end_token():
    rollout = Rollout(
        prompt_ids_BP=torch.tensor([[9, 9, 5]]),
        prompt_mask_BP=torch.tensor([[False, True, True]]),  # the second 9 is a token of the prompt
        response_ids_BR=torch.tensor([[4, 9, 9]]),
        response_lengths_B=torch.tensor([2]),
        sampled_logprobs_BR=torch.zeros(1, 3),
        ended_B=torch.tensor([True]),
    )
    assert rollout.prompt_of(0).tolist() == [9, 5]
    assert rollout.response_of(0).tolist() == [4, 9]
    assert rollout.response_mask_BR.tolist() == [[True, True, False]]


def test_a_text_has_no_end_token():
    """Nor does it lose its last token where a stop string ended it."""
    rollout = Rollout(
        prompt_ids_BP=torch.tensor([[5], [5], [5]]),
        prompt_mask_BP=torch.ones(3, 1, dtype=torch.bool),
        response_ids_BR=torch.tensor([[4, 9, 0], [3, 7, 0], [3, 3, 3]]),
        response_lengths_B=torch.tensor([2, 2, 3]),
        sampled_logprobs_BR=torch.zeros(3, 3),
        ended_B=torch.tensor([True, True, False]),
    )
    assert rollout.texts(torch.Tensor.tolist, {9}) == ["[4]", "[3, 7]", "[3, 3, 3]"]
