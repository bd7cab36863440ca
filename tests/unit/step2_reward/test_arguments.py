"""The flags of step 2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.step2_reward.arguments import RewardModelArguments, check_margins, check_sharing
from training.step2_reward.main import main
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.flags import note_mistakes


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RewardModelArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound():
    assert sentences() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"margin_scale": -1.0}, "--margin_scale expects 0 or more, got -1.0"),
        ({"center_coef": -0.1}, "--center_coef expects 0 or more, got -0.1"),
        ({"normalization_rows": -1}, "--normalization_rows expects 0 or more, got -1"),
        (
            {"label_smoothing": 0.5},
            "--label_smoothing expects 0 or more and less than 0.5, got 0.5",
        ),
    ],
)
def test_a_setting_that_cannot_be(given, sentence):
    assert sentences(**given) == [sentence]


def test_margins_that_are_asked_for_must_be_there():
    ids = np.ones(1, np.int32)
    without, without_too = ResponsesRow(0, ids, (ids, ids)), ResponsesRow(1, ids, (ids, ids, ids))
    check_margins([without], RewardModelArguments())
    check_margins([without, ResponsesRow(1, ids, (ids, ids), np.zeros(1))], RewardModelArguments(margin_scale=0.5))
    with pytest.raises(ThreestepError, match="--margin_scale 0.5 needs margins and no training row.*--margin_col"):
        check_margins([without, without_too], RewardModelArguments(margin_scale=0.5))


@pytest.mark.needs_plugin("embedded")
def test_a_reward_model_has_no_chunks_of_logits():
    with pytest.raises(ThreestepError, match="--head_chunk_mb is for a language model's output layer, got 4 for a rew"):
        main(["--model_name_or_path", "m", "--data_path", "embedded", "--head_chunk_mb", "4"])


def test_tokens_compared_one_by_one_stand_in_one_piece():
    def flags(shared: int, loss_from: str) -> Any:
        own = RewardModelArguments(loss_from=loss_from)
        return SimpleNamespace(engine=EngineArguments(share_beginnings=shared), of_step=own)

    check_sharing(flags(64, "end"))
    check_sharing(flags(0, "first_difference"))
    with pytest.raises(ThreestepError, match="--loss_from first_difference reads .* --share_beginnings 64 may cut it"):
        check_sharing(flags(64, "first_difference"))
