"""The experts that a rollout of transformers noted, and the ways of decoding that note them."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.decode_check import recording_way
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS


def test_samples_of_a_prompt_have_one_choice_for_it():
    from training.utils.contracts.rollout import DrawnExperts

    ids = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 5, 6]])
    given = [torch.full((4, 1, 2), number, dtype=torch.int16) for number in (1, 2, 3)]
    drawn = DrawnExperts.of_sequences(given, (ids, ids != 0), torch.tensor([3, 1, 1]))
    assert drawn.prompt_BPLK[:, :, 0, 0].tolist() == [[-1, 1, 1], [-1, 1, 1], [3, 3, 3]]
    assert drawn.response_BRLK[:, :, 0, 0].tolist() == [[1, 1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert drawn.of_sequence(0, (ids != 0)[0], 3)[:, 0, 0].tolist() == [1, 1, 1, 1, -1]


def test_ways_that_do_not_record():
    assert recording_way(FIXED, "Model") is MASKED and recording_way(WAYS[1], "Model") is WAYS[1]
    with pytest.raises(ThreestepError, match="--replay_routers needs prompts of different lengths in one batch"):
        recording_way(WAYS[2], "Model")
