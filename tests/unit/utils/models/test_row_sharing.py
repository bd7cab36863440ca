"""Ranks that have their rows for themselves, and a plugin's that share them."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.flags.added import NO_FLAGS
from training.utils.models.row_sharing import ALONE, WHOLE_ROWS, RowSharing, row_sharing


def shared_by_two(flags: object) -> RowSharing:
    return RowSharing(2, flag="--ranks_of_a_row")


def test_a_rank_alone_has_whole_rows():
    inputs, model, rows = {"input_ids": torch.zeros(1, 3)}, object(), object()
    assert ALONE.joined(1, 4) is ALONE and ALONE.part_of(model, rows, inputs) == (inputs, WHOLE_ROWS)  # type: ignore[arg-type]
    assert ALONE.sizes_for(model, 4, 16) == [1] and WHOLE_ROWS.sharing is ALONE  # type: ignore[arg-type]


def test_every_slot_and_position_of_whole_rows_is_the_ranks_own():
    slots_L = torch.arange(6)
    assert WHOLE_ROWS.cut_slots(slots_L, -1) is slots_L and WHOLE_ROWS.whole_slots(slots_L) is slots_L
    own = WHOLE_ROWS.owned(slots_L)
    assert own.local_m is own.of(slots_L) is own.whole(slots_L) is slots_L
    states_LH = torch.arange(6.0).view(3, 2)
    assert WHOLE_ROWS.moved(states_LH, torch.tensor([0, 0, 1])).tolist() == [[0, 1], [0, 1], [2, 3]]


def test_a_plugin_says_which_ranks_share_rows(monkeypatch):
    tables: dict[str, str] = {}
    monkeypatch.setattr("training.utils.models.row_sharing.added", lambda table, known: tables)
    assert row_sharing(NO_FLAGS) is ALONE
    tables["ranks_of_a_row"] = f"{__name__}:shared_by_two"
    assert row_sharing(NO_FLAGS).size == 2
    tables["slices"] = f"{__name__}:shared_by_two"
    with pytest.raises(ThreestepError, match="shared in one way, and --ranks_of_a_row and --ranks_of_a_row would each"):
        row_sharing(NO_FLAGS)
