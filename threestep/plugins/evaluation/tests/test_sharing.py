"""Pieces of work in turns, and a rank that fails while the first one waits for it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from threestep.plugins.evaluation.sharing import ALONE, Sharers
from training.utils.base.errors import ThreestepError


def test_one_process_does_all_of_it():
    assert ALONE.results("squares", 4, lambda piece: piece**2) == [0, 1, 4, 9]


@pytest.fixture
def three():
    store = dist.HashStore()
    return [Sharers(rank, 3, store) for rank in range(3)]


def test_the_first_rank_gets_every_result_in_order_and_each_piece_is_worked_once(three):
    worked: list[int] = []

    def work(piece: int) -> list[int]:
        worked.append(piece)
        return [piece, piece**2]

    assert [one.results("a", 7, work) for one in three[1:]] == [[], []]
    assert three[0].results("a", 7, work) == [[piece, piece**2] for piece in range(7)]
    assert sorted(worked) == list(range(7)) and list(three[1].pieces(7)) == [1, 4]


def test_the_first_rank_does_not_wait_for_one_that_failed(three):
    three[2].store.set("failed", "2")
    three[1].results("a", 3, lambda piece: piece)
    with pytest.raises(ThreestepError, match="rank 2 failed; what it said is above"):
        three[0].results("a", 3, lambda piece: piece)
