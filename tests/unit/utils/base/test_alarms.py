"""Alarms outside of the main thread, and the time limit of calls in it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from training.utils.base import alarms
from training.utils.base.alarms import RefusedAlarm, TimeIsUp, alarms_noted, time_limit


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def asks(number):
    """Set a handler, and answer a refusal oneself."""
    try:
        signal.signal(number, signal.getsignal(number))
    except ValueError as refusal:
        return str(refusal)


def test_a_refused_alarm_is_noted_though_it_is_caught():
    def work():
        with alarms_noted() as noted:
            assert asks(signal.SIGTERM).startswith("signal only works in main thread")
            assert not noted.any  # ends of the program are no limits of time
            assert asks(signal.SIGALRM).startswith("signal only works in main thread")
        return noted.any

    assert in_thread(work)
    with alarms_noted() as noted:
        assert asks(signal.SIGALRM) is None
    assert not noted.any


def test_a_refused_alarm_of_a_coroutine_and_its_threads_is_noted():
    async def own():
        await asyncio.to_thread(asks, signal.SIGALRM)

    def work():
        with alarms_noted() as noted:
            asyncio.run(own())
        return noted.any

    assert in_thread(work)


def test_a_refusal_ends_the_call_where_it_is_to():
    def work():
        with alarms_noted(ends_call=True):
            asks(signal.SIGALRM)

    with pytest.raises(RefusedAlarm):
        in_thread(work)


def test_a_thread_of_a_function_is_warned_of_once(capsys, monkeypatch):
    monkeypatch.setattr(alarms, "_warned", threading.Event())
    with alarms_noted() as noted:
        for _ in range(2):
            in_thread(lambda: asks(signal.SIGALRM))
    assert not noted.any
    assert (
        capsys.readouterr().err.count("warning: a time limit by signals (signal.signal) was refused in the thread") == 1
    )


def test_work_in_time_and_work_that_is_late():
    before = signal.getsignal(signal.SIGURG)
    with time_limit(30, pytest.fail):
        pass
    with pytest.raises(TimeIsUp), time_limit(0.05, pytest.fail):
        threading.Event().wait(30)
    assert signal.getsignal(signal.SIGURG) == before


def test_a_call_that_never_returns_to_python_is_given_up():
    program = (
        "import os, signal, threading\n"
        "from training.utils.base import alarms\n"
        "alarms._STRIKES, alarms._STRIKE_SECONDS = 2, 0.1\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})\n"  # as a call in C: no handler runs
        "with alarms.time_limit(0.1, lambda: os._exit(7)):\n"
        "    threading.Event().wait(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 7
