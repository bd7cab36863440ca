"""Requests: each field is honoured or refused by name, texts are shown as they are drawn, rows are freed in time."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from threestep.plugins.serve.endpoint.fields import CompletionRequest, read_request
from threestep.plugins.serve.endpoint.lines import DrawnToken, Event, Line, Order
from threestep.plugins.serve.endpoint.replies import ReplyForms
from threestep.plugins.serve.endpoint.service import Answering
from threestep.plugins.serve.endpoint.text import AnswerText
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.contracts.rollout_engine import Sampling

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields) -> CompletionRequest:
    return read_request({"model": "m", "messages": HI, **fields}, True, "m")


def text(**fields) -> CompletionRequest:
    return read_request({"model": "m", "prompt": "Hi", **fields}, False, "m")


def test_what_is_given_is_read():
    asked = chat(
        n=3, seed=5, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=9, min_p=0.1, stop="a", stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    sampling = {"temperature": 0.0, "top_p": 0.5, "top_k": 9, "min_p": 0.1}
    assert asked == CompletionRequest(HI, [], 3, 5, 7, sampling, ("a",), 4, True, True) and asked.is_chat
    assert chat() == CompletionRequest(HI, [])
    assert chat(logprobs=True).alternatives == 0 and chat(logprobs=False).alternatives is None
    assert chat(max_tokens=4, max_completion_tokens=4).most_tokens == 4


def test_a_text_may_be_several_and_ids():
    assert text().prompts == ["Hi"] and not text().is_chat
    assert text(prompt=["a", "b"]).prompts == ["a", "b"]
    assert text(prompt=[1, 2]).prompts == [[1, 2]]
    assert text(prompt=[[1], [2, 3]], logprobs=2).prompts == [[1], [2, 3]]
    assert text(logprobs=2).alternatives == 2


def test_what_clients_send_back_of_an_answer_is_read():
    said = {"role": "assistant", "content": "Yes?", "refusal": None, "annotations": None, "tool_calls": []}
    parts = [{"type": "text", "text": "Si"}, {"type": "text", "text": "ng"}]
    messages = [{"role": "developer", "content": "Be short"}, *HI, said, {"role": "user", "content": parts}]
    read = {"system": "Be short", "user": "Hi", "assistant": "Yes?"}
    told = [{"role": role, "content": text} for role, text in read.items()]
    assert chat(messages=messages).messages == [*told, {"role": "user", "content": "Sing"}]


def test_fields_at_the_value_that_changes_nothing_are_read():
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"}
    assert chat(**nothing, response_format={"type": "text"}, user="me", metadata={"a": "b"}, stop=None) == chat()
    assert text(best_of=1, echo=False, suffix="") == text()


REFUSED = [
    ({"frequency_penalty": 0.5}, "'frequency_penalty' is not supported, so it must be 0, got"),
    ({"response_format": {"type": "json_object"}}, "'response_format' is not supported, so it must be"),
    ({"tools": [{}]}, "'tools' is not supported"),
    ({"temprature": 1}, "'temprature' is not supported; leave it out; did you mean 'temperature'"),
    ({"echo": True}, "'echo' is not supported"),
    ({"temperature": 2.5}, "'temperature' expects a number from 0 to 2, got 2.5"),
    ({"temperature": True}, "'temperature' expects a number from 0 to 2, got True"),
    ({"temperature": float("nan")}, "'temperature' expects a number from 0 to 2, got nan"),
    ({"top_p": 0}, "'top_p' expects more than 0 and at most 1, got 0"),
    ({"n": 0}, "'n' must be a whole number from 1 to 128, got 0"),
    ({"n": 1.0}, "'n' must be a whole number from 1 to 128, got 1.0"),
    ({"seed": "a"}, "'seed' must be a whole number"),
    ({"stop": [""]}, "'stop' must be a text or a list of at most 16 texts, none of them empty, got"),
    ({"stop": ["a"] * 17}, "'stop' must be a text or a list of at most 16"),
    ({"stream": 1}, "'stream' must be true or false, got 1"),
    ({"stream_options": {"include_usage": True}}, "'stream_options' needs 'stream': true; set it"),
    ({"stream": True, "stream_options": {"a": 1}}, "'stream_options' must be an object with 'include_usage', got"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "mean the same but have different values"),
    ({"top_logprobs": 2}, "'top_logprobs' needs 'logprobs': true; give both"),
    ({"messages": []}, "'messages' must be a list with at least one message, got"),
    ({"messages": ["Hi"]}, r"'messages\[0\]' must be an object with 'role' and 'content', got 'Hi'"),
    ({"messages": [{"role": "me"}]}, r"'messages\[0\].role' must be one of system, developer, user, assistant, tool"),
    ({"messages": [{**HI[0], "name": "Ann"}]}, r"'messages\[0\].name' is not supported; a message may have role"),
    ({"messages": [*HI, {"role": "assistant", "content": "a"}]}, "must end with a user or tool message"),
    ({"messages": [{"role": "user", "content": 5}]}, r"'messages\[0\].content' must be a text or a list of text parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
     "got a part of type 'image_url'; this server accepts only text"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_others_are_refused_by_name(fields, sentence):
    with pytest.raises(RefusedRequest, match=sentence) as refusal:
        chat(**fields)
    assert refusal.value.status == 400 and refusal.value.param is not None


def test_a_text_is_refused_for_what_is_none():
    for prompt in (5, [], [1.5], ["a", 5]):
        with pytest.raises(RefusedRequest, match="'prompt' must be a text, token ids, or a list of either, got"):
            text(prompt=prompt)
    with pytest.raises(RefusedRequest, match="'prompt' is required but missing"):
        read_request({"model": "m"}, False, "m")


def test_the_model_must_be_the_one_that_is_served():
    with pytest.raises(
        RefusedRequest, match="'model' must be 'm', the only model on this server, got 'gpt-4'"
    ) as refusal:
        read_request({"model": "gpt-4", "messages": HI}, True, "m")
    assert (refusal.value.status, refusal.value.code) == (404, "model_not_found")
    with pytest.raises(RefusedRequest, match="'model' must be the model's name, 'm', but it is missing"):
        read_request({"messages": HI}, True, "m")
    with pytest.raises(RefusedRequest, match="the body must be a JSON object, got a list"):
        read_request([], True, "m")


END = 0


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", "replace")


def shown(text: bytes, stop=(), strips: bool = False, end: bool = True) -> tuple[list[str], AnswerText]:
    """What is shown after each byte, a token here, and then the end token."""
    answer, news = AnswerText(decode, frozenset({END}), stop, strips), []
    for token in [*text, *([END] if end else [])]:
        answer.take(DrawnToken(token))
        news.append(answer.news())
    return news, answer


@pytest.mark.parametrize(
    ("text", "stop", "end", "news", "tokens"),
    [
        ("abc", (), True, ["a", "b", "c", ""], 4),
        ("é.", (), True, ["", "é", ".", ""], 4),  # a character is shown once it is complete
        # What may begin a stop text waits; the tokens are with those of the stop text, and none behind it.
        ("abENxENDyz", ["END"], False, ["a", "b", "", "", "ENx", "", "", "", "", ""], 8),
        ("abEN", ["END"], True, ["a", "b", "", "", "EN"], 5),  # what waited is shown at the end
    ],
)
def test_each_token_is_shown_once(text, stop, end, news, tokens):
    found, answer = shown(text.encode(), stop, end=end)
    assert (found, answer.finish, len(answer.tokens)) == (news, "stop", tokens)


def test_the_earliest_stop_text_cuts():
    answer = AnswerText(lambda ids: "one two", frozenset({END}), ["two", " "], False)
    answer.take(DrawnToken(5))  # a token that completes both
    assert answer.news() == "one" and answer.finish == "stop"


@pytest.mark.parametrize("strips", [True, False])
def test_spaces_around_an_answer_belong_to_the_style(strips):
    news, _ = shown(b" a b ", strips=strips)
    assert "".join(news) == ("a b" if strips else " a b ")
    assert news[0] == ("" if strips else " ")


ORDER = Order((5,), Sampling(9, 0.0, 0, 1.0, end_token_id=0, pad_token_id=0), frozenset({0}), 0)


def decoded(ids) -> str:
    return bytes(ids).decode()


def answering(*events: Event, stop: tuple[str, ...] = ()) -> Answering:
    """Two answers, of which these news have come."""
    queue = SimpleQueue[Event]()
    for event in events:
        queue.put(event)
    lines = [Line(ORDER, place, queue) for place in range(2)]
    texts = [AnswerText(decoded, ORDER.ends, stop, False) for _ in lines]
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
