"""Guesses of what followed the same tokens before, by hand."""

from __future__ import annotations

import torch

from tests.unit.utils.generation.decoding.test_hf import PLAIN
from threestep.plugins.speculation.ngrams import NOTHING, NgramRows
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding.cache import moves_when_leaving


def test_what_followed_last_is_guessed():
    """Two samples of one prompt and two of another, which share tables; rows move together when others leave."""
    ids_BP = torch.tensor([[7, 8, 9, 5, 6, 7, 8], [0, 0, 0, 1, 2, 3, 1]])
    mask_BP = torch.tensor([[1] * 7, [0] * 3 + [1] * 4]).bool()
    rows = NgramRows(RolloutRequest(ids_BP, mask_BP, PLAIN, range(4), 2), 2)
    found_AK = rows.guess(torch.tensor([[9], [9], [2], [4]]), torch.ones(4).long())
    # 7 8 9 was followed by 5 6; 3 1 2 by nothing, but 1 2 by 3, and 2 3 by 1.
    assert found_AK.tolist() == [[5, 6], [5, 6], [3, 1], [NOTHING, NOTHING]]
    found_AK = rows.guess(torch.tensor([[4, 0], [5, 6], [3, 1], [4, 4]]), torch.tensor([1, 2, 2, 2]))
    # 2 3 1 was followed by 2 in the one sample and, later, by 4 in the other, and 3 1 4 by 4.
    assert found_AK.tolist() == [[NOTHING, NOTHING], [7, 8], [4, 4], [4, 4]]
    rows.leave(moves_when_leaving([True, True, False, False], torch.device("cpu")))
    assert rows.guess(torch.tensor([[1], [1]]), torch.ones(2).long()).shape == (2, 0)


def test_few_rows_with_a_guess_do_not_guess():
    ids_BP = torch.tensor([[7, 8, 9, 5, 7, 8]])
    for samples, width in ((4, 1), (5, 0)):
        rows = NgramRows(RolloutRequest(ids_BP, ids_BP.bool(), PLAIN, range(samples), samples), 1)
        drawn_A1 = torch.tensor([[9], *([row] for row in range(20, 19 + samples))])
        assert rows.guess(drawn_A1, torch.ones(samples).long()).shape == (samples, width)
