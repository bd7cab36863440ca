"""The flags of step 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from training.step1_sft import main, trainer
from training.step1_sft.arguments import SftArguments
from training.utils.base.errors import Mistakes
from training.utils.flags.added import NO_FLAGS
from training.utils.flags.flags import note_mistakes


def test_learning_rate():
    mistakes = Mistakes()
    note_mistakes(SftArguments(), mistakes)
    assert mistakes.sentences == []
    note_mistakes(SftArguments(learning_rate=0.0), mistakes)
    assert mistakes.sentences == ["--learning_rate expects more than 0, got 0.0"]


def test_what_is_opened_is_passed_on(monkeypatch):
    monkeypatch.setattr(trainer, "SftTrainer", lambda *given: SimpleNamespace(train=lambda: given))
    opened, flags = "run", SimpleNamespace(added=NO_FLAGS)
    passed_on: Any = main.train
    run, regularizer = passed_on(opened, flags)
    assert run == opened and not regularizer.losses
