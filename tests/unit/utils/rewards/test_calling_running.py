"""Reward functions in threads: answers, what they raise, and the limit of their time."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow
from training.utils.rewards import calling
from training.utils.rewards.calling import RuleBatch, RunningRule, start_rules

CPU = torch.device("cpu")
ROWS = [PromptRow(index, np.array([10 + index]), f"prompt {index}", f"truth {index}") for index in range(2)]
BATCH = RuleBatch(["u0", "u1"], ["p", "q"], ["yes", "no"], {"level": [1, 2]})


@pytest.fixture
def gate():
    """An event that a rule waits for; set at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_function_works_in_another_thread_which_knows_the_ranks_gpu(gate, monkeypatch):
    seen, placed, device = [], [], torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "set_device", placed.append)

    def own(prompts, responses, *, level):
        seen.append(threading.current_thread())
        assert gate.wait(30)
        return [float(number) for number in level], {"n": level}

    started = RunningRule("own", own, BATCH, device=device)
    gate.set()  # reached: the function has not kept this thread
    assert started.collect(30) == ([1.0, 2.0], {"n": [1.0, 2.0]})
    (thread,) = seen
    assert thread is not threading.current_thread() and thread.daemon and placed == [device]


def test_time_counts_from_the_start_and_what_is_done_is_never_late(gate):
    late = RunningRule("late", lambda *texts, **columns: gate.wait(30), BATCH)
    done = RunningRule("done", lambda *texts, **columns: [1, 2], BATCH)
    time.sleep(0.2)
    assert done.collect(0.1) == ([1.0, 2.0], {})
    with pytest.raises(ThreestepError) as caught:
        late.collect(0.1)
    assert str(caught.value) == (
        "reward function 'late' did not return within --reward_timeout 0.1 seconds for 2 samples, the first with "
        "uid u0, prompt 'p', response 'yes'; allow more time, or use fewer samples per rollout"
    )


def raises(prompts, responses, **columns):
    return [1.0 if response == "yes" else 1 / 0 for response in responses]


def leaves(prompts, responses, **columns):
    sys.exit(3)


def divides_under_an_alarm(prompts, responses, **columns):
    return [limited(partial(divmod, 1.0, response == "yes"))[0] for response in responses]


def complains(prompts, responses, **columns):
    raise ThreestepError("a sentence of its own")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (raises, r"^reward function 'own' raised ZeroDivisionError: division by zero \(.*_running.py, line \d+\) "
        "for uid u1, prompt 'q', response 'no'$"),
        (leaves, r"^reward function 'own' raised SystemExit: 3 \(.*\) for uid u0, prompt 'p'"),
        (divides_under_an_alarm, "'own' raised ZeroDivisionError: .* for uid u1, prompt 'q'"),
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
    with pytest.raises(ThreestepError, match=r"raised OSError: gone \(.*\) for a batch of 2 samples, the first with "):
        started.collect(0.0)


def test_what_fails_on_one_rank_is_raised_on_all(monkeypatch):
    """First this rank's function is fine and another's was not; then it fails here, and the others are told."""
    told, other = [], "reward function 'own' raised ValueError"
    monkeypatch.setattr(calling, "largest", lambda number, device: told.append(number) or 1)
    monkeypatch.setattr(calling, "gathered", lambda said: [said, other])
    for answer, said in (([1, 2], other), ([1], "reward function 'own': expected 2 numbers, one per response, got 1")):
        rules = {"own": lambda *texts, answer=answer, **columns: answer}
        wait = start_rules(rules, ROWS, ["a", "b"], (), timeout_seconds=30.0, device=CPU)
        with pytest.raises(ThreestepError, match=said):
            wait()
    assert told == [0, 1]


class OverTime(Exception):
    """What users' time limits raise."""


def limited(work, seconds=0.2):
    """Do `work` under an alarm, as the time limits of Math-Verify, timeout-decorator and others do."""

    def over(number, frame):
        raise OverTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def scored(response):
    """1 for "yes"; anything else takes too long, and is 0.5."""
    try:
        return limited(lambda: 1.0 if response == "yes" else time.sleep(30))
    except OverTime:
        return 0.5


def loud(prompts, responses, **columns):
    return [scored(response) for response in responses]


def quiet(prompts, responses, **columns):
    try:
        return loud(prompts, responses)
    except Exception:  # noqa: BLE001 - as users write it
        return [0.0] * len(responses)


def quieter(prompts, responses, **columns):
    try:
        return loud(prompts, responses)
    except:  # noqa: E722 - as some users write it
        return [0.0] * len(responses)


async def own_task(responses):
    return quiet([], responses)


async def awaited(prompts, responses, **columns):
    await asyncio.sleep(0)
    return await own_task(responses)


@pytest.mark.parametrize("rule", [loud, quiet, quieter, awaited])
def test_alarms_of_a_function_work_whatever_it_catches(rule, capsys):
    for _ in range(2):  # the second call is in the main thread at once
        assert RunningRule("own", rule, BATCH).collect(30) == ([1.0, 0.5], {})
    assert capsys.readouterr().out.count("reward function 'own' sets alarms (signal.signal)") == 1


def test_functions_with_alarms_are_called_anew_with_their_state_beside_one_without():
    calls = []

    def own(prompts, responses, **columns):
        limited(lambda: None)
        calls.append(len(responses))
        return [len(calls)] * 2

    rules = {"own": own, "plain": lambda *texts, **columns: [3, 4], "quiet": quiet}
    for number in (1.0, 2.0, 3.0):
        answers = start_rules(rules, ROWS, ["yes", "no"], (), timeout_seconds=30.0, device=CPU)()
        assert answers == {"own": ([number] * 2, {}), "plain": ([3.0, 4.0], {}), "quiet": ([1.0, 0.5], {})}
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("catches", [False, True])
def test_the_limit_of_time_holds_in_the_main_thread_beside_the_functions_alarms(catches):
    def own(prompts, responses, **columns):
        limited(lambda: None)
        try:
            time.sleep(30)
        except BaseException:
            if not catches:
                raise
        return [0.0, 0.0]

    begin = time.monotonic()
    with pytest.raises(ThreestepError, match="'own' did not return within --reward_timeout 0.3 seconds for 2 samples"):
        RunningRule("own", own, BATCH).collect(0.3)
    assert time.monotonic() - begin < 10


def test_an_alarm_that_a_function_leaves_set_does_not_strike_the_run():
    def own(prompts, responses, **columns):
        signal.signal(signal.SIGALRM, lambda number, frame: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return [1.0, 1.0]

    struck = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: struck.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.4)  # of the program around the run
    try:
        RunningRule("own", own, BATCH).collect(30)
        time.sleep(0.2)
        assert not struck
        time.sleep(0.4)
        assert struck == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_ctrl_c_reaches_a_function_in_the_main_thread():
    def own(prompts, responses, **columns):
        limited(lambda: None)
        signal.raise_signal(signal.SIGINT)
        return [1.0, 1.0]

    noted = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            RunningRule("own", own, BATCH).collect(30)
        signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))  # as a run in its loop has it
        assert RunningRule("own", own, BATCH).collect(30)[0] == [1.0, 1.0]
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT]


def test_a_run_outside_of_the_main_thread_is_told():
    problems = []

    def run():
        try:
            RunningRule("own", quiet, BATCH).collect(30)
        except ThreestepError as problem:
            problems.append(str(problem))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "'own' limits time with signals (signal.signal), which work only in the main" in problems[0]


def test_a_function_with_alarms_sees_no_event_loop_and_has_gradients():
    def own(prompts, responses, **columns):
        limited(lambda: None)
        return asyncio.run(own_task(responses)), {"grad": [float(torch.is_grad_enabled())] * 2}

    async def cell():  # a notebook's
        with torch.no_grad():
            return RunningRule("own", own, BATCH).collect(30)

    assert asyncio.run(cell()) == ([1.0, 0.5], {"grad": [1.0, 1.0]})
