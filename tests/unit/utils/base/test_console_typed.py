"""The command that resumes a run is the one that was typed."""

from __future__ import annotations

import pytest

from training.utils.base.console import (
    COMMAND_VARIABLE,
    resuming_command,
    typed_command,
)


@pytest.mark.parametrize(
    ("variables", "ranks", "command"),
    [
        ({}, 1, "python -m training.a.main"),
        ({}, 2, "THREESTEP_RANKS=2 python -m training.utils.run.launch training.a.main"),
        ({"THREESTEP_RANKS": "1"}, 1, "THREESTEP_RANKS=1 python -m training.utils.run.launch training.a.main"),
        ({COMMAND_VARIABLE: "threestep sft"}, 2, "threestep sft --num_ranks 2"),
        ({COMMAND_VARIABLE: "bash scripts/a.sh", "THREESTEP_RANKS": "2"}, 2, "bash scripts/a.sh --num_ranks 2"),
    ],
)
def test_the_command_is_the_one_that_was_typed(monkeypatch, variables, ranks, command):
    for name in (COMMAND_VARIABLE, "THREESTEP_RANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert typed_command() == variables.get(COMMAND_VARIABLE)
    assert resuming_command("training.a.main", ranks) == command
