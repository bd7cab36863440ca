"""The flags of one model."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import ModelSettings


def mistakes_of(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(ModelArguments(**{"model_name_or_path": "m", **given}), mistakes)
    return mistakes.sentences


def test_defaults_need_only_a_model():
    assert mistakes_of() == []
    assert (
        "--model_name_or_path expects the folder or hub name of a model, got nothing"
        in mistakes_of(model_name_or_path="")[0]
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dropout": -0.1}, "--dropout expects 0 or more and less than 1, got -0.1"),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(**given) == [sentence]


def test_all_of_them_at_once():
    assert len(mistakes_of(model_name_or_path="", head_chunk_mb=-1, dropout=2.0)) == 3


def test_every_setting_is_passed_on():
    given = {
        "attn_implementation": "flex_attention", "dropout": 0.1, "gradient_checkpointing": True,
        "trust_remote_code": True, "head_chunk_mb": 64, "freeze_vision_tower": False,
        "freeze_projector": True, "rope_scaling": "yarn:4",
    }  # fmt: skip
    settings = ModelArguments(model_name_or_path="m", **given).settings()
    others = {"name_or_path": "m", "trains_adapter_on": False, "takes_media": False, "new_head": False}
    assert vars(settings) == {**others, "preparers": settings.preparers, **given}
    assert ModelArguments(model_name_or_path="m").settings() == ModelSettings("m")
