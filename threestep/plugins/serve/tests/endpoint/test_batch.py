"""The thread that draws: who waits, who is refused, and what a failure leaves behind."""

from __future__ import annotations

import threading

import pytest

from threestep.plugins.serve.endpoint.batch import Batch
from threestep.plugins.serve.endpoint.lines import DrawnToken, Order
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.contracts.rollout_engine import Sampling

ORDER = Order((5, 6), Sampling(5, 0.0, 0, 1.0, end_token_id=2, pad_token_id=0), frozenset({2}), 0)


class Rows:
    """Draws the token 7 until `gate` is closed. most: lines that were drawn together."""

    gate = threading.Event()
    most = 0

    def __init__(self, problem: Exception | None = None) -> None:
        self.lines, self.problem = [], problem

    def join(self, lines) -> None:
        self.lines += lines
        Rows.most = max(Rows.most, len(self.lines))
        self.step()

    def step(self) -> None:
        Rows.gate.wait(10)
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        for line in self.lines:
            line.take(DrawnToken(7))

    def leave(self) -> None:
        self.lines = [line for line in self.lines if not line.is_over]


@pytest.fixture(autouse=True)
def gate():
    Rows.gate.clear()
    Rows.most = 0
    yield
    Rows.gate.set()


def events_of(queue, count: int) -> list:
    return [queue.get(timeout=10) for _ in range(count)]


def test_lines_wait_for_a_row_and_too_many_are_refused():
    batch = Batch(Rows, most_rows=2, most_waiting=3)
    _, first = batch.submit([ORDER] * 3)
    with pytest.raises(RefusedRequest, match=r"3 responses are waiting, and 1 more would exceed .*waiting 3") as none:
        batch.submit([ORDER])
    assert none.value.status == 429 and none.value.code == "rate_limit_exceeded"
    batch.start()
    Rows.gate.set()
    found = events_of(first, 18)
    assert [event.ended for event in found].count("length") == 3 and Rows.most == 2
    batch.close(5)
    with pytest.raises(RefusedRequest, match="the server is shutting down; send the request again once it is back"):
        batch.submit([ORDER])


def test_those_who_hung_up_wait_no_more():
    batch = Batch(Rows, most_rows=1, most_waiting=2)
    lines, _ = batch.submit([ORDER] * 2)
    lines[0].is_over = lines[1].is_over = True
    assert batch.drawing == 0
    _, last = batch.submit([ORDER] * 2)
    batch.start()
    Rows.gate.set()
    assert len(events_of(last, 12)) == 12
    batch.close(5)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (ValueError("a fault"), "the server failed; see its log"),
        (MemoryError(), "out of memory; start the server with a lower --max_rows"),
    ],
)
def test_a_failure_ends_what_is_drawn_and_nothing_else(problem, sentence, capsys):
    made = [problem, None, None]
    batch = Batch(lambda: Rows(made.pop(0)), most_rows=2, most_waiting=3)
    _, failing = batch.submit([ORDER])
    batch.start()
    Rows.gate.set()
    assert sentence in str(failing.get(timeout=10).failed)
    assert ("a fault" in capsys.readouterr().err) == isinstance(problem, ValueError)
    _, fine = batch.submit([ORDER])
    assert len(made) == 1  # what failed draws no more
    assert events_of(fine, 6)[-1].ended == "length"
    batch.close(5)


def test_what_is_not_drawn_in_time_fails_at_the_end():
    batch = Batch(Rows, most_rows=1, most_waiting=3)
    _, events = batch.submit([ORDER] * 2)
    batch.start()
    closing = threading.Thread(target=batch.close, args=(0.1,))
    closing.start()
    threading.Timer(0.5, Rows.gate.set).start()
    closing.join(10)
    failed = [event.failed for event in events_of(events, events.qsize()) if event.failed is not None]
    assert failed and all("the server is shutting down" in str(problem) for problem in failed)


reading = threading.Event()


class SlowToJoin(Rows):
    """Has the lines only once their prompts are read."""

    def join(self, lines) -> None:
        reading.set()
        Rows.gate.wait(10)
        super().join(lines)


def test_lines_whose_prompts_are_being_read_are_waited_for():
    reading.clear()
    batch = Batch(SlowToJoin, most_rows=2, most_waiting=3)
    _, events = batch.submit([ORDER])
    batch.start()
    assert reading.wait(10)
    threading.Timer(0.2, Rows.gate.set).start()
    batch.close(10)
    assert events.qsize() and all(event.failed is None for event in events_of(events, events.qsize()))
