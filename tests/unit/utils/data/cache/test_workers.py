"""Work in forked processes: every job once, failures raised here, nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.cache import workers
from training.utils.data.cache.workers import BuildStopped, run_jobs, worker_count


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_job_is_done_once(num_workers):
    done = dict(run_jobs(7, lambda job: {"square": job * job, "process": os.getpid()}, num_workers))
    assert {job: answer["square"] for job, answer in done.items()} == {job: job * job for job in range(7)}
    processes = {answer["process"] for answer in done.values()}
    assert (os.getpid() in processes) == (num_workers == 1)
    assert list(run_jobs(0, lambda job: {}, num_workers)) == []
    assert list(run_jobs(1, lambda job: {"process": os.getpid()}, num_workers)) == [(0, {"process": os.getpid()})]
    answers = run_jobs(100, lambda job: {}, num_workers)
    next(answers)
    answers.close()  # whoever stops listening ends all workers
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("before", [None, "true"])
def test_a_tokenizers_threads_are_off_in_the_children_alone(before, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    answers = [answer for _, answer in run_jobs(3, lambda job: {"is": os.environ["TOKENIZERS_PARALLELISM"]}, 2)]
    assert answers == [{"is": "false"}] * 3
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def fail(job):
    if job == 3:
        raise ThreestepError("row 3 is wrong")
    if job == 4:
        raise OSError(28, "No space left on device", "/somewhere/file")
    if job == 5:
        raise KeyError("column")
    if job == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.parametrize(
    ("first", "kind", "message"),
    [
        (3, ThreestepError, "^row 3 is wrong$"),
        (4, OSError, "No space left on device.*/somewhere/file"),
        (5, RuntimeError, "a worker process failed:(.|\n)*in fail\n(.|\n)*KeyError: 'column'"),
        (
            6,
            BuildStopped,
            r"--num_workers: a worker process died \(exit code -9;.*a lower --num_workers",
        ),
    ],
)
def test_a_failure_is_raised_here_and_ends_all_workers(first, kind, message):
    with pytest.raises(kind, match=message):
        list(run_jobs(3, lambda job: fail(first if job == 1 else 0), 2))
    assert multiprocessing.active_children() == []


def test_a_failure_waits_for_nobody():
    def work(job):
        if job == 1:
            raise ThreestepError("row 3 is wrong")
        time.sleep(120)  # longer than the patience of the whole suite with a test, were it waited for

    started = time.monotonic()
    with pytest.raises(ThreestepError):
        list(run_jobs(2, work, 2))
    assert multiprocessing.active_children() == [] and time.monotonic() - started < 60


ORPHANS = """
import os, time
from training.utils.data.cache.workers import run_jobs

def work(job):
    os.write(1, b"%d\\n" % os.getpid())  # one write: lines of two processes stay whole
    time.sleep(120)

list(run_jobs(2, work, 2))
"""


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_of_a_killed_program_end_in_the_middle_of_their_work():
    program = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    workers = [int(program.stdout.readline()) for _ in range(2)]
    program.kill()
    program.wait()
    program.stdout.close()
    ends = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_how_many_workers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert worker_count(3, 10) == 3
    assert [worker_count(None, rows) for rows in (0, 1999, 7473, 10**6)] == [1, 1, 7, 64]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert worker_count(None, 10**6) == worker_count(8, 10**6) == 1


def test_a_daemons_child_has_no_children():
    assert list(run_jobs(2, lambda job: {"can": workers.can_fork()}, 2))[0][1] == {"can": False}
