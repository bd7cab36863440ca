"""A user's mistake ends a program with one sentence and code 2; anything else with its traceback and code 70."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.run import program

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


def failing(_argv):
    raise ThreestepError("expected 1, got 2")


def test_one_sentence_and_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        program.run_program(failing)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: expected 1, got 2\n")


@pytest.mark.parametrize(("words", "said"), [([], "stopped by Ctrl-C"), (["by a second one"], "by a second one")])
def test_an_interrupt_is_a_sentence_too(words, said, capsys):
    def interrupted(_argv):
        raise KeyboardInterrupt(*words)

    with pytest.raises(SystemExit) as end:
        program.run_program(interrupted)
    assert end.value.code == 130 and capsys.readouterr().err == f"error: {said}\n"


def test_as_a_process():
    done = subprocess.run([sys.executable, "-c", MISTAKEN, "a"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: expected less, got ['a']\n")


def test_success_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--seed", "1"])
    seen = []
    program.run_program(seen.append)
    assert seen == [["--seed", "1"]]
    assert capsys.readouterr().err == ""


def test_our_own_errors_keep_their_traceback_and_have_a_code_of_their_own(capsys):
    def broken(_argv):
        raise ValueError("ours, of https://name:secret@host/rows")

    with pytest.raises(SystemExit) as end:
        program.run_program(broken)
    assert end.value.code == program.CRASH_EXIT_CODE == 70
    said = capsys.readouterr()
    assert said.err.startswith("Traceback (most recent call last)") and "ValueError: ours" in said.err
    assert "secret" not in said.err and not said.out


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


def test_where_nothing_can_be_claimed_every_rank_speaks(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    assert program._claim_to_speak("x") and program._claim_to_speak("x")


GLOO = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"


def test_what_a_lost_rank_looks_like():
    assert program.is_lost_rank(RuntimeError(GLOO))
    assert program.is_lost_rank(torch.distributed.DistBackendError("NCCL error"))
    assert program.is_lost_rank(ConnectionResetError("Connection reset by peer"))
    assert not program.is_lost_rank(RuntimeError("shapes differ")) and not program.is_lost_rank(ValueError(GLOO))


@pytest.fixture
def among_two(monkeypatch, tmp_path):
    """run_program on a rank of two that share tmp_path; what ends with the exit code."""
    monkeypatch.setattr(program.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(program, "_FIRST_ERROR_SECONDS", 0.2)
    monkeypatch.setattr(program.signal, "signal", lambda *given: None)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def run(rank: int, problem: Exception) -> int:
        monkeypatch.setenv("RANK", str(rank))

        def main(_argv):
            raise problem

        with pytest.raises(SystemExit) as end:
            program.run_program(main)
        return end.value.code

    return run


def test_the_first_error_of_several_ranks_is_printed_once(among_two, capsys):
    assert among_two(1, ZeroDivisionError("the first")) == 70
    said = capsys.readouterr().err
    assert (
        said.startswith("error on rank 1, the first of the run:\nTraceback") and "ZeroDivisionError: the first" in said
    )
    assert among_two(0, RuntimeError(GLOO)) == 1 and among_two(0, KeyError("a later one")) == 70
    assert capsys.readouterr().err == ""


def test_a_mistake_is_a_first_error_too(among_two, capsys):
    assert among_two(1, ThreestepError("expected 1, got 2")) == 2 and among_two(0, RuntimeError(GLOO)) == 1
    assert capsys.readouterr().err == "error: expected 1, got 2\n"


def test_a_rank_that_ended_without_a_word(among_two, capsys):
    assert among_two(0, RuntimeError(GLOO)) == 1
    assert capsys.readouterr().err == (
        "error: rank 0 lost another rank, which ended without an error message: killed from outside, or by the "
        f"system for its memory ({GLOO}); with checkpoints, --resume continues from the last one\n"
    )


def test_a_rank_that_hangs(among_two, capsys):
    assert among_two(0, RuntimeError("gloo: Timed out waiting 5000ms for recv operation to complete")) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 0 waited for another rank, which hangs or is far slower, until --rank_")
