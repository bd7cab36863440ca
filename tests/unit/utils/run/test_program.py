"""A user's mistake ends a program with one sentence and code 2; anything else with its traceback and code 70."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.run import program
from training.utils.run.program import quick_imports

MISTAKEN = """
from training.utils.base.errors import ThreestepError
from training.utils.run.program import run_program
def main(argv):
    raise ThreestepError(f"expected less, got {argv}")
run_program(main)
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def ends_with(problem: BaseException) -> int:
    """Run a program that raises; return its exit code."""

    def main(_argv):
        raise problem

    with pytest.raises(SystemExit) as end:
        program.run_program(main)
    return end.value.code


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (ThreestepError("expected 1, got 2"), 2, "error: expected 1, got 2\n"),
        (KeyboardInterrupt(), 130, "error: stopped by Ctrl-C\n"),
        (KeyboardInterrupt("by a second one"), 130, "error: by a second one\n"),
        (
            ValueError("ours, of https://name:secret@host/rows"),
            program.CRASH_EXIT_CODE,
            "Traceback (most recent call la",
        ),
    ],
)
def test_how_a_program_ends(problem, code, said, capsys, monkeypatch):
    """A mistake with one sentence and code 2, our own errors with their traceback and 70, success without a word."""
    monkeypatch.setattr(sys, "argv", ["program", "--seed", "1"])
    seen: list[list[str]] = []
    program.run_program(seen.append)
    assert seen == [["--seed", "1"]] and capsys.readouterr().err == ""
    assert ends_with(problem) == code and program.CRASH_EXIT_CODE == 70
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(said) and "secret" not in printed.err
    assert printed.err == said or "ValueError: ours" in printed.err


def test_ranks_that_meet_one_mistake_say_it_once(tmp_path):
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": "1", "TMPDIR": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MISTAKEN], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert sorted(said) == ["", "error: expected less, got []\n"]


def test_a_later_run_says_it_again(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path))
    assert program._claim_to_speak("x")
    assert not program._claim_to_speak("x")
    assert program._claim_to_speak("y")
    for claim in tmp_path.iterdir():
        os.utime(claim, (1, 1))
    assert program._claim_to_speak("x")
    assert len(list(tmp_path.iterdir())) == 1  # the old ones are gone
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    assert program._claim_to_speak("x") and program._claim_to_speak("x")  # nothing can be claimed: every rank speaks


GLOO = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"


def test_what_a_lost_rank_looks_like():
    assert program.is_lost_rank(RuntimeError(GLOO))
    assert program.is_lost_rank(torch.distributed.DistBackendError("NCCL error"))
    assert program.is_lost_rank(ConnectionResetError("Connection reset by peer"))
    assert not program.is_lost_rank(RuntimeError("shapes differ")) and not program.is_lost_rank(ValueError(GLOO))


@pytest.fixture
def among_two(monkeypatch, tmp_path):
    """A rank of two that share tmp_path; returns the exit code."""
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(program, "_FIRST_ERROR_SECONDS", 0.2)
    monkeypatch.setattr(program.signal, "signal", lambda *given: None)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def run(rank: int, problem: Exception) -> int:
        monkeypatch.setenv("RANK", str(rank))
        return ends_with(problem)

    return run


def test_the_first_error_of_several_ranks_is_printed_once(among_two, capsys):
    assert among_two(1, ZeroDivisionError("the first")) == 70
    said = capsys.readouterr().err
    assert said.startswith("error on rank 1 (the first of the run):\nTrace") and "ZeroDivisionError: the first" in said
    assert among_two(0, RuntimeError(GLOO)) == 1 and among_two(0, KeyError("a later one")) == 70
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("first", "lost", "said"),
    [
        (ThreestepError("expected 1, got 2"), RuntimeError(GLOO), "error: expected 1, got 2\n"),
        (
            None,
            RuntimeError(GLOO),
            "error: rank 0 lost another rank, which ended without an error message; it was killed from outside, or by "
            f"the system for lack of memory ({GLOO}); with checkpoints, --resume continues from the last one\n",
        ),
        (
            None,
            RuntimeError("gloo: Timed out waiting 5000ms for recv operation to complete"),
            "error: rank 0 waited for another rank, which hangs or is far slower, until --rank_",
        ),
    ],
    ids=["a mistake is a first error too", "ended without a word", "hangs"],
)
def test_a_lost_rank(among_two, capsys, first, lost, said):
    assert first is None or among_two(1, first) == 2
    assert among_two(0, lost) == 1 and capsys.readouterr().err.startswith(said)


def test_garbage_is_not_looked_for_inside_and_is_again_behind():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0  # these objects are not a program's imports alone
    with pytest.raises(ImportError), quick_imports():
        import no_such_package  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_a_program_never_looks_through_its_imports_again():
    code = """
import gc, sys
from training.utils.run.program import quick_imports
counts = [gc.get_freeze_count()]
with quick_imports():
    sys.modules["torch"] = json = __import__("json")  # stands for it
counts.append(gc.get_freeze_count())
with quick_imports():
    import decimal, email, asyncio  # what follows is the same program's
counts.append(gc.get_freeze_count())
print(*counts, gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    none, first, second, collects = done.stdout.split()
    assert none == "0" and 0 < int(first) < int(second) and collects == "True"
