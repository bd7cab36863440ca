"""The flags of step 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from training.step1_sft import main, trainer
from training.step1_sft.arguments import SftArguments, check_flags
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.flags import note_mistakes


def test_learning_rate():
    mistakes = Mistakes()
    note_mistakes(SftArguments(), mistakes)
    assert mistakes.sentences == []
    note_mistakes(SftArguments(learning_rate=0.0), mistakes)
    assert mistakes.sentences == ["--learning_rate expects more than 0, got 0.0"]


@pytest.mark.parametrize("flag", ["neftune_alpha", "z_loss_coef"])
def test_what_is_added_to_the_loss_is_off_and_never_negative(flag):
    assert getattr(SftArguments(), flag) == 0.0
    mistakes = Mistakes()
    note_mistakes(SftArguments(**{flag: -1.0}), mistakes)
    assert mistakes.sentences == [f"--{flag} expects 0 or more, got -1.0"]


def test_every_setting_is_passed_on(monkeypatch):
    monkeypatch.setattr(trainer, "SftTrainer", lambda *given, **_: SimpleNamespace(train=lambda: given))
    opened: Any = SimpleNamespace(training="run")
    assert main.train(opened, SftArguments(neftune_alpha=5.0, z_loss_coef=1e-4)) == ("run", 5.0, 1e-4)
    assert main.train(opened, SftArguments()) == ("run", 0.0, 0.0)


def test_the_likelihood_may_be_left_out_where_something_else_trains():
    def flags(coefficient: float, trains_alone: bool) -> Any:
        return SimpleNamespace(
            engine=EngineArguments(),
            of_step=SftArguments(likelihood_coef=coefficient),
            guests=SimpleNamespace(trains_alone=trains_alone),
        )

    check_flags(flags(0.0, True))
    check_flags(flags(0.5, False))
    with pytest.raises(ThreestepError, match="--likelihood_coef 0 leaves the model to a teacher, and there is none; "):
        check_flags(flags(0.0, False))


def test_noise_of_each_row_goes_with_no_shared_tokens():
    def flags(shared: int, alpha: float) -> Any:
        return SimpleNamespace(
            engine=EngineArguments(share_beginnings=shared),
            of_step=SftArguments(neftune_alpha=alpha),
        )

    check_flags(flags(0, 5.0))
    check_flags(flags(64, 0.0))
    with pytest.raises(ThreestepError, match="--share_beginnings 64 computes a token once .* --neftune_alpha 5 gives"):
        check_flags(flags(64, 5.0))
