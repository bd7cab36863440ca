"""Work shared between processes that are forked from this one. Knows nothing of rows or files.

A forked child has the datasets, their classes and the tokenizer as they are: nothing is sent, re-read or re-imported,
and classes registered in the running program work. A tokenizer's threads do not survive a fork and are switched off in
the children. Only Linux forks a process with threads safely enough (torch's DataLoader does the same there);
elsewhere this process does the work.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any, cast

from training.utils.base.errors import ThreestepError

# Fewer rows than this are not worth a process: forking and joining one takes some 20 ms.
ROWS_PER_WORKER = 1000
_ORPHAN_CHECK_SECONDS = 0.5


class BuildStopped(ThreestepError):
    """Something outside the data stopped a build: a full disk, a killed process. Finished shards stay."""


def worker_count(num_workers: int | None, rows: int) -> int:
    """Processes to build with: `num_workers`, otherwise one per core that may be used, but no more than `rows` need."""
    if not can_fork():
        return 1
    if num_workers is not None:
        return num_workers
    return max(1, min(len(os.sched_getaffinity(0)), rows // ROWS_PER_WORKER))


def can_fork() -> bool:
    """True if this process may fork: on Linux, unless it is itself a daemonic child."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def run_jobs(
    jobs: int, work: Callable[[int], dict[str, Any]], num_workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (job, work(job)) for each job 0 .. jobs - 1 in the order in which they end.

    `work` returns JSON values. A single worker is this process itself. The first failure stops all workers and is
    raised here: ThreestepError and OSError as they are, anything else as a RuntimeError with the worker's traceback;
    BuildStopped where a worker was killed.
    """
    if num_workers == 1 or jobs < 2:
        for job in range(jobs):
            yield job, work(job)
        return
    workers = _start(min(num_workers, jobs), work)
    waiting = iter(range(jobs))
    busy: dict[Connection, int] = {}
    try:
        for channel in workers:
            _hand_out(channel, waiting, busy)
        while busy:
            for channel in cast(list[Connection], wait(list(busy))):
                job, answer = busy.pop(channel), _receive(channel, workers[channel])
                _hand_out(channel, waiting, busy)
                yield job, answer
    finally:
        for channel, process in workers.items():
            channel.close()
            if busy:  # a failure: the results of the others are not needed
                process.kill()
        for process in workers.values():
            process.join()


def _start(count: int, work: Callable[[int], dict[str, Any]]) -> dict[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    workers: dict[Connection, ForkProcess] = {}
    with _tokenizer_threads_off(), warnings.catch_warnings():
        # Python 3.12 warns about forking with threads; those of torch and tokenizers hold no lock that a child takes.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        for _ in range(count):
            ours, theirs = Pipe()
            process = context.Process(target=_serve, args=(theirs, [*workers, ours], work, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
    return workers


@contextmanager
def _tokenizer_threads_off() -> Iterator[None]:
    """While children are forked, and in them for good: tokenizers reads this variable at every call."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _hand_out(channel: Connection, waiting: Iterator[int], busy: dict[Connection, int]) -> None:
    job = next(waiting, None)
    if job is not None:
        channel.send_bytes(json.dumps(job).encode())
        busy[channel] = job


def _receive(channel: Connection, process: ForkProcess) -> dict[str, Any]:
    try:
        answer = json.loads(channel.recv_bytes())
    except (EOFError, ConnectionError):
        process.join()
        raise BuildStopped(
            f"--num_workers: a worker process died (exit code {process.exitcode}; -9 means killed, usually out of "
            "memory); run again with a lower --num_workers; finished work is reused"
        ) from None
    if "mistake" in answer:
        raise ThreestepError(answer["mistake"])
    if "refused" in answer:
        raise OSError(*answer["refused"])
    if "failed" in answer:
        raise RuntimeError(f"a worker process failed:\n{answer['failed']}")
    return answer["done"]


def _serve(channel: Connection, others: list[Connection], work: Callable[[int], dict[str, Any]], parent: int) -> None:
    """A child: one job after another until the parent is gone. others: the parent's ends, which only it keeps open."""
    for other in others:
        other.close()
    gc.freeze()  # a look for garbage would copy the pages of what the parent holds,
    gc.set_threshold(20_000, 20, 10)  # and rows are in no circles: a tenth of the time without this
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            job = json.loads(channel.recv_bytes())
        except (EOFError, ConnectionError):
            return
        answer: dict[str, Any]
        try:
            answer = {"done": work(job)}
        except ThreestepError as mistake:
            answer = {"mistake": str(mistake)}
        except OSError as error:
            answer = {"refused": [error.errno, error.strerror, error.filename]}
        except Exception:  # noqa: BLE001 (sent to the parent, which raises it)
            answer = {"failed": traceback.format_exc()}
        with suppress(ConnectionError):  # the parent is gone: so is the next job
            channel.send_bytes(json.dumps(answer).encode())


def _end_with(parent: int) -> None:
    """End this child with its parent: it would finish its job otherwise, and hold the parent's locks until then."""
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_SECONDS)
    os._exit(1)
