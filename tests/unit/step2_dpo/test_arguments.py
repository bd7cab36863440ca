"""The flags of direct preference optimisation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from training.step2_dpo.arguments import DpoArguments, check_reference
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.models.arguments import ModelArguments


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(DpoArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_and_each_loss_are_right():
    assert sentences() == []
    assert sentences(loss_type="ipo") == sentences(loss_type="hinge") == sentences(label_smoothing=0.1) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"beta": -0.1}, "--beta expects more than 0, got -0.1"),
        (
            {"loss_type": "sigmoidal"},
            "--loss_type expects one of sigmoid, ipo, hinge, got 'sigmoidal'; did you mean 'sigmoid'?",
        ),
        (
            {"reference": "adapters_off"},
            "--reference expects one of cached, adapter_off, got 'adapters_off'; did you mean 'adapter_off'?",
        ),
        ({"sft_coef": -1.0}, "--sft_coef expects 0 or more, got -1.0"),
        ({"label_smoothing": 0.5}, "--label_smoothing expects 0 or more and less than 0.5, got 0.5"),
        (
            {"label_smoothing": 0.1, "loss_type": "ipo"},
            "--label_smoothing 0.1 needs --loss_type sigmoid: 'ipo' has no such form",
        ),
    ],
)
def test_mistakes(given, said):
    assert sentences(**given) == [said]


def flags(reference: str, **model) -> SimpleNamespace:
    return SimpleNamespace(own=SimpleNamespace(reference=reference), model=ModelArguments(**model))


@pytest.mark.parametrize("model", [{}, {"lora_dim": 4, "only_optimize_lora": False}])
def test_adapter_off_needs_adapters_that_train_alone(model):
    with pytest.raises(ThreestepError, match="--reference adapter_off needs --lora_dim above 0 and --only_optimize"):
        check_reference(flags("adapter_off", **model))
    check_reference(flags("cached", **model))
    check_reference(flags("adapter_off", lora_dim=4))
