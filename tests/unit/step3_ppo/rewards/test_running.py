"""Reward functions in threads: answers, what they raise, and the limit of their time."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from training.step3_ppo.rewards.calling import RuleBatch
from training.step3_ppo.rewards.running import RunningRule
from training.utils.run.errors import ThreestepError

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

    running = RunningRule("own", own, BATCH)
    gate.set()  # reached: the function has not kept this thread
    assert running.collect(30) == ([1.0, 2.0], {"n": [1.0, 2.0]})
    (thread,) = seen
    assert thread is not threading.current_thread() and thread.daemon


def test_a_function_that_takes_too_long_is_named_with_its_samples(gate):
    running = RunningRule("slow", lambda *texts, **columns: gate.wait(30), BATCH)
    with pytest.raises(ThreestepError) as caught:
        running.collect(0.05)
    assert str(caught.value) == (
        "reward function 'slow' did not return within --reward_timeout 0.05 seconds for 2 samples, the first of them "
        "uid u0, prompt 'p', response 'yes'; give it more time or fewer samples a rollout"
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
        (lambda *texts, **columns: [1.0, float("inf")], "expected a finite number, got inf for uid u1, prompt 'q'"),
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

    running = RunningRule("own", own, BATCH)
    assert looking.wait(30)
    with pytest.raises(ThreestepError, match=r"raised OSError: gone \(.*\) for 2 samples at once, the first of them "):
        running.collect(0.0)
