"""The dataset's prompts in shuffled epochs, or in its order."""

from __future__ import annotations

import numpy as np
import pytest

from training.step3_ppo.contracts.rollouts import PromptSource
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.layout.order import ShuffledStream


def rows(count):
    return [PromptRow(i, np.array([i + 10], np.int32), f"prompt {i}", str(i)) for i in range(count)]


def test_shuffled_epochs_are_the_default():
    prompts = rows(5)
    source = PromptSource(prompts, 5)
    stream = ShuffledStream(5, 5)
    for first, count in ((0, 3), (3, 9), (1, 2)):  # a function of the position: any order
        assert [row.row_id for row in source.take(first, count)] == stream.take(first, count)
    source.load_state_dict(source.state_dict())
    assert source.state_dict() == {}
    in_order = PromptSource(prompts, 5, shuffled=False)
    assert [row.row_id for row in in_order.take(3, 4)] == [3, 4, 0, 1]


def test_the_state_of_a_choice_of_prompts_is_refused():
    with pytest.raises(ThreestepError, match="the saved run chose its prompts by a dataset and a sampler"):
        PromptSource(rows(2), 1).load_state_dict({"sampler": {}, "dataset": {}})
