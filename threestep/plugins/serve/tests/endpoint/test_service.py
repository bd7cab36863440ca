"""A request that is being answered: its rows are freed as soon as their answers are complete."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from threestep.plugins.serve.endpoint.fields import CompletionRequest
from threestep.plugins.serve.endpoint.lines import DrawnToken, Event, Line, Order
from threestep.plugins.serve.endpoint.replies import ReplyForms
from threestep.plugins.serve.endpoint.service import Answering
from threestep.plugins.serve.endpoint.text import AnswerText
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.contracts.rollout_engine import Sampling

ORDER = Order((5,), Sampling(9, 0.0, 0, 1.0, end_token_id=0, pad_token_id=0), frozenset({0}), 0)


def decode(ids) -> str:
    return bytes(ids).decode()


def answering(*events: Event, stop: tuple[str, ...] = ()) -> Answering:
    """Two answers, of which these news have come."""
    queue = SimpleQueue[Event]()
    for event in events:
        queue.put(event)
    lines = [Line(ORDER, place, queue) for place in range(2)]
    texts = [AnswerText(decode, ORDER.ends, stop, False) for _ in lines]
    asked = CompletionRequest([], [], samples=2, stop=stop)
    return Answering(asked, ReplyForms("m", True, False, chr), lines, texts, queue, 1)


def told(place: int, text: str) -> list[Event]:
    return [Event(place, token=DrawnToken(token)) for token in text.encode()]


def test_an_answer_at_its_stop_text_is_drawn_no_further():
    asked = answering(*told(0, "ab."), *told(1, "c"), stop=(".",))
    looks = iter([False, True])
    assert asked.whole(lambda: next(looks)) is None  # the client hangs up at the second look
    assert asked.texts[0].finish == "stop" and asked.texts[1].finish is None

    asked = answering(*told(0, "ab."), *told(1, "c"), stop=(".",))
    chunks = asked.chunks(lambda: False)
    while asked.texts[0].finish is None:
        next(chunks)
    assert asked.lines[0].is_over and not asked.lines[1].is_over


def test_a_client_that_hung_up_frees_all_its_rows():
    asked = answering()
    assert list(asked.chunks(lambda: True))[2:] == [] and all(line.is_over for line in asked.lines)


def test_a_failure_of_one_answer_is_that_of_the_request():
    asked = answering(*told(0, "a"), Event(1, failed=ValueError("no numbers")))
    with pytest.raises(RefusedRequest, match="no numbers") as failure:
        asked.whole(lambda: False)
    assert failure.value.status == 500 and all(line.is_over for line in asked.lines)
