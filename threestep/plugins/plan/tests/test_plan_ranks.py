"""A plan of a step on many ranks starts none."""

from __future__ import annotations

from threestep import command
from training.utils.base.console import COMMAND_VARIABLE


def test_a_plan_starts_no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "THREESTEP_RANKS", COMMAND_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    ran = []
    monkeypatch.setattr(command, "_run_here", lambda module, words: ran.append((module, words)))
    command.main(["sft", "--num_ranks", "8", "--dry_run", "true"])
    assert ran == [("training.step1_sft.main", ["--num_ranks", "8", "--dry_run", "true"])]
