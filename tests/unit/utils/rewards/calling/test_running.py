"""Reward functions in threads: answers, what they raise, and the limit of their time."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.rewards.calling import running
from training.utils.rewards.calling.calling import RuleBatch
from training.utils.rewards.calling.running import RunningRule, start_rules

CPU = torch.device("cpu")
ROWS = [PromptRow(index, np.array([10 + index]), f"prompt {index}", f"truth {index}") for index in range(2)]
BATCH = RuleBatch(["u0", "u1"], ["p", "q"], ["yes", "no"], {"level": [1, 2]})


@pytest.fixture
def gate():
    """An event that a rule waits for; set at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_function_works_in_another_thread(gate):
    seen = []

    def own(prompts, responses, *, level):
        seen.append(threading.current_thread())
        assert gate.wait(30)
        return [float(number) for number in level], {"n": level}

    started = RunningRule("own", own, BATCH)
    gate.set()  # reached: the function has not kept this thread
    assert started.collect(30) == ([1.0, 2.0], {"n": [1.0, 2.0]})
    (thread,) = seen
    assert thread is not threading.current_thread() and thread.daemon


def test_a_function_that_takes_too_long_is_named_with_its_samples(gate):
    started = RunningRule("slow", lambda *texts, **columns: gate.wait(30), BATCH)
    with pytest.raises(ThreestepError) as caught:
        started.collect(0.05)
    assert str(caught.value) == (
        "reward function 'slow' did not return within --reward_timeout 0.05 seconds for 2 samples, the first of them "
        "uid u0, prompt 'p', response 'yes'; give it more time or fewer samples per rollout"
    )


def test_time_counts_from_the_start_and_what_is_done_is_never_late(gate):
    late, done = RunningRule("late", lambda *texts, **columns: gate.wait(30), BATCH), None
    done = RunningRule("done", lambda *texts, **columns: [1, 2], BATCH)
    time.sleep(0.2)
    assert done.collect(0.1) == ([1.0, 2.0], {})
    with pytest.raises(ThreestepError, match="'late' did not return within --reward_timeout 0.1 seconds"):
        late.collect(0.1)


def raises(prompts, responses, **columns):
    return [1.0 if response == "yes" else 1 / 0 for response in responses]


def leaves(prompts, responses, **columns):
    sys.exit(3)


def complains(prompts, responses, **columns):
    raise ThreestepError("a sentence of its own")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (raises, r"^reward function 'own' raised ZeroDivisionError: division by zero \(.*test_running.py, line \d+\) "
        "for uid u1, prompt 'q', response 'no'$"),
        (leaves, r"^reward function 'own' raised SystemExit: 3 \(.*\) for uid u0, prompt 'p'"),
        (complains, "^a sentence of its own$"),
        (lambda *texts, **columns: [1.0, float("inf")], "expected a number that is finite in float32, got inf for uid"),
    ],
)  # fmt: skip
def test_what_a_function_raises_comes_out(rule, said):
    with pytest.raises(ThreestepError, match=said):
        RunningRule("own", rule, BATCH).collect(30)


def test_no_time_left_to_look_for_the_sample(gate):
    looking = threading.Event()

    def own(prompts, responses, **columns):
        if len(responses) == 2:
            raise OSError("gone")
        looking.set()
        gate.wait(30)

    started = RunningRule("own", own, BATCH)
    assert looking.wait(30)
    with pytest.raises(ThreestepError, match=r"raised OSError: gone \(.*\) for 2 samples at once, the first of them "):
        started.collect(0.0)


def test_what_fails_on_one_rank_is_raised_on_all(monkeypatch):
    """This rank's function is fine; another's was not."""
    other = "reward function 'own' raised ValueError"
    monkeypatch.setattr(running, "largest", lambda number, device: 1)
    monkeypatch.setattr(running, "gathered", lambda said: [said, other])
    wait = start_rules(
        {"own": lambda *texts, **columns: [1, 2]}, ROWS, ["a", "b"], (), timeout_seconds=30.0, device=CPU
    )
    with pytest.raises(ThreestepError, match=other):
        wait()


def test_what_fails_here_is_told_to_the_others(monkeypatch):
    told = []
    monkeypatch.setattr(running, "largest", lambda number, device: told.append(number) or number)
    wait = start_rules({"own": lambda *texts, **columns: [1]}, ROWS, ["a", "b"], (), timeout_seconds=30.0, device=CPU)
    with pytest.raises(ThreestepError, match="reward function 'own': expected 2 numbers, one per response, got 1"):
        wait()
    assert told == [1]


def test_a_thread_knows_the_ranks_gpu(monkeypatch):
    placed = []
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)
    device = torch.device("cuda", 3)
    assert running._on_device(lambda texts, *, level: [texts, level], device)("t", level=1) == ["t", 1]
    assert placed == [device]
