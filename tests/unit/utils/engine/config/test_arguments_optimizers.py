"""Names of optimizers, and what they do not go with."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes
from training.utils.engine.config.arguments import ADAMW, OPTIMIZERS, EngineArguments
from training.utils.flags.flags import note_mistakes
from training.utils.plugins.plugin import OptimizerEntry


def mistakes_of(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(EngineArguments(**given), mistakes)
    return mistakes.sentences


def test_an_unknown_name_is_refused_with_those_that_there_are():
    [sentence] = mistakes_of(optimizer="adam")
    assert sentence.startswith("--optimizer expects one of adamw") and "got 'adam'" in sentence


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_of_whole_weights_gets_no_pieces(monkeypatch, stage):
    monkeypatch.setitem(OPTIMIZERS, "whole", OptimizerEntry("module:name", whole_weights=True))
    wanted = (
        f"--optimizer whole reads whole weights, and --zero_stage {stage} hands it flat pieces of them; give "
        "--zero_stage 0, or another optimizer"
    )
    assert mistakes_of(optimizer="whole", zero_stage=stage) == ([wanted] if stage else [])
    assert mistakes_of(optimizer=ADAMW, zero_stage=stage) == []
