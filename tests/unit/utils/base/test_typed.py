"""The command that resumes a run is the one that was typed."""

from __future__ import annotations

import pytest

from training.utils.base.typed import (
    COMMAND_VARIABLE,
    OWN_WORDS_VARIABLE,
    resuming_command,
    resuming_whole_run,
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


@pytest.mark.parametrize(
    ("variables", "words", "command"),
    [
        ({}, ["--config", "a b"], "python -m training.all_steps --config 'a b' --resume"),
        ({COMMAND_VARIABLE: "threestep all"}, ["--config", "a", "--resume"], "threestep all --config a --resume"),
        ({}, ["--resume", "true", "--config", "a"], "python -m training.all_steps --resume --config a"),
        ({}, ["--config", "a", "--resume=false"], "python -m training.all_steps --config a --resume"),
        ({}, ["--config", "true", "--resume", "False"], "python -m training.all_steps --config true --resume"),
        (
            {COMMAND_VARIABLE: "bash scripts/quickstart.sh", OWN_WORDS_VARIABLE: "2"},
            ["--work_dir", "/x"],
            "bash scripts/quickstart.sh --resume",
        ),
    ],
)
def test_a_whole_run_is_resumed_without_the_words_that_nobody_typed(monkeypatch, variables, words, command):
    for name in (COMMAND_VARIABLE, OWN_WORDS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resuming_whole_run("training.all_steps", words) == command
