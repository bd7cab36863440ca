"""Seconds by phase, on a clock that the test moves."""

from __future__ import annotations

import pytest
import torch

from training.utils.run import phase_clock
from training.utils.run.phase_clock import PhaseClock, gpu_wait, timed


@pytest.fixture
def tick(monkeypatch):
    """tick(seconds) lets time pass."""
    now = [100.0]
    monkeypatch.setattr(phase_clock.time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_phases_add_up_to_the_time_that_passed(tick):
    clock = PhaseClock()
    tick(1)
    with clock.phase("learn"):
        tick(2)
        with clock.phase("reward"):  # inside another: its 4 seconds are its own alone
            tick(4)
        tick(8)
    with clock.phase("learn"):
        tick(16)
    tick(32)
    assert clock.read() == {"other": 33.0, "learn": 26.0, "reward": 4.0}
    tick(64)
    assert clock.read() == {"other": 64.0}  # begun anew


def test_a_phase_that_raises_is_closed(tick):
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.phase("learn"):
        tick(1)
        raise KeyError
    tick(2)
    assert clock.read() == {"other": 2.0, "learn": 1.0}


def test_a_timed_method_is_a_phase_and_keeps_its_name_and_result(tick):
    class Loop:
        def __init__(self) -> None:
            self.clock = PhaseClock()

        @timed("7_learn")
        def learn(self, seconds: float) -> str:
            """Learn."""
            tick(seconds)
            return "done"

    loop = Loop()
    assert loop.learn(seconds=3.0) == "done" and loop.learn.__doc__ == "Learn."
    assert loop.clock.read()["7_learn"] == 3.0


def test_a_gpu_is_waited_for_at_every_border():
    waits = []
    clock = PhaseClock(wait=lambda: waits.append(1))
    with clock.phase("learn"):
        assert len(waits) == 1
    assert len(waits) == 2
    assert gpu_wait(torch.device("cpu")) is None
