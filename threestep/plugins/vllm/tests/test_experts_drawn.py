"""Experts of sequences as a rollout has them."""

from __future__ import annotations

import torch

from threestep.plugins.vllm.experts import drawn_experts


def test_samples_of_a_prompt_have_one_choice_for_it():
    ids = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 5, 6]])
    given = [torch.full((4, 1, 2), number, dtype=torch.int16) for number in (1, 2, 3)]
    drawn = drawn_experts(given, (ids, ids != 0), torch.tensor([3, 1, 1]))
    assert drawn.prompt_BPLK[:, :, 0, 0].tolist() == [[-1, 1, 1], [-1, 1, 1], [3, 3, 3]]
    assert drawn.response_BRLK[:, :, 0, 0].tolist() == [[1, 1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert drawn.of_sequence(0, (ids != 0)[0], 3)[:, 0, 0].tolist() == [1, 1, 1, 1, -1]
