"""Signals are noted; the second SIGINT ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from training.utils.checkpoints.interrupts import SIGNALS, Interrupts, seconds_since_start

TWICE = """
import os, signal
from training.utils.checkpoints.interrupts import Interrupts
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGINT)
    print(interrupts.reason, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interrupts() as interrupts:
        assert interrupts.reason is None
        os.kill(os.getpid(), number)
        assert interrupts.reason == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_second_interrupt_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stdout == "SIGINT\n"


def test_the_time_since_the_start_grows():
    first = seconds_since_start()
    assert 0 < first <= seconds_since_start()
