"""Signals are noted and announced; the second SIGINT ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from training.utils.checkpoints.interrupts import SIGNALS, Interrupts

TWICE = """
import os, signal
from training.utils.checkpoints.interrupts import Interrupts
with Interrupts(alone=ALONE) as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    print(interrupts.reason, flush=True)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print("still here", flush=True)
    except KeyboardInterrupt as stop:
        print(stop, flush=True)
"""


def test_a_run_in_a_thread_notes_no_signal():
    with ThreadPoolExecutor(1) as pool, Interrupts():
        assert pool.submit(Interrupts().__enter__).result().reason is None


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interrupts() as interrupts:
        assert interrupts.reason is None
        os.kill(os.getpid(), number)
        assert interrupts.reason == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize(
    ("alone", "code", "said"),
    [
        (True, 0, "stopped at once by a second Ctrl-C, without a checkpoint for this step\n"),
        (False, -signal.SIGINT, ""),
    ],
)
def test_a_second_interrupt_ends_the_run_at_once(alone, code, said):
    program = TWICE.replace("ALONE", str(alone))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stdout == "SIGINT\n" + said


LOST = """
import contextlib, os, signal
from training.utils.checkpoints.interrupts import Interrupts
with contextlib.suppress(RuntimeError), Interrupts(alone=False):
    raise RuntimeError("WORDS")
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [("gloo: Connection closed by peer", 0, "still here\n"), ("shapes differ", -signal.SIGTERM, "")],
)
def test_a_rank_that_lost_another_is_not_ended_before_it_says_so(words, code, said):
    done = subprocess.run(
        [sys.executable, "-c", LOST.replace("WORDS", words)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code and done.stdout == said


def test_an_interrupt_within_a_second_of_the_first_is_the_same(capfd):
    with Interrupts() as interrupts:
        again = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        again.start()
        os.kill(os.getpid(), signal.SIGINT)
        again.join()
        assert interrupts.reason == "SIGINT"
    assert capfd.readouterr().err.count("SIGINT") == 1


def test_the_first_signal_says_what_follows(capfd):
    with Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "\nSIGTERM: finishing this step, then writing a checkpoint\n"
    with Interrupts(announces=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert "press Ctrl-C again to stop at once, without one" in capfd.readouterr().err
