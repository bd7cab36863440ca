"""The server by raw requests: who is answered, what is refused, what many get at once, and who hangs up."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.evaluation.model import prompt_of
from threestep.plugins.serve.endpoint.model import load_served
from threestep.plugins.serve.endpoint.web_server import CHAT, MODELS, TEXT
from threestep.plugins.serve.tests.endpoint.conftest import KEY, SAMPLING, serving
from training.utils.data.rows.arguments import ChatArguments

HI = [{"role": "user", "content": "Hi"}]


def test_nobody_without_the_key_is_answered(client):
    for key in (None, "", KEY[:-1], f"{KEY}x", "K\u00e9y"):
        for path, body in ((MODELS, None), (CHAT, {}), ("/", None)):
            status, answer = client.send(path, body, key=key and key.encode("utf-8").decode("latin-1"))
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert "needs the key that it printed when it started" in answer["error"]["message"]
    assert client.send(MODELS, None, key=None, Authorization=f"Basic {KEY}")[0] == 401
    assert client.send(MODELS, None, key=None, Authorization=f"bearer {KEY}")[0] == 200


def test_the_model_is_listed(client):
    status, answer = client.send(MODELS)
    assert status == 200 and [model["id"] for model in answer["data"]] == ["tiny"]
    assert client.send(f"{MODELS}/tiny")[1]["object"] == "model"
    status, answer = client.send(f"{MODELS}/other")
    assert status == 404 and answer["error"]["message"] == "there is no model 'other'; this server has 'tiny'"


REFUSED = [
    ("GET", "/v2", None, 404, "there is no /v2; this server has /v1/chat/completions, /v1/completions and /v1/models"),
    ("POST", "/v1/embeddings", {}, 404, "there is no /v1/embeddings;"),
    ("GET", CHAT, None, 405, f"{CHAT} takes no GET"),
    ("PUT", CHAT, {}, 405, f"{CHAT} takes no PUT"),
    ("POST", MODELS, {}, 405, f"{MODELS} takes no POST"),
    ("POST", CHAT, b"{", 400, "the body must be JSON: "),
    ("POST", CHAT, b"[" * 100 + b"]" * 100, 400, "the body must be JSON: lists and objects are nested"),
    ("POST", CHAT, b"\xff", 400, "the body must be JSON: "),
    ("POST", CHAT, b"x" * (2**16 + 1), 413, "the body may have at most 65,536 bytes, got 65,537"),
    ("POST", CHAT, {"model": "tiny", "messages": HI, "nonsense": 1}, 400, "'nonsense' is not supported"),
    ("POST", TEXT, {"model": "tiny", "prompt": [99999]}, 400, "'prompt' must contain ids from 0 to"),
    ("POST", TEXT, {"model": "tiny", "prompt": ""}, 400, "'prompt' must not be empty"),
    (
        "POST",
        TEXT,
        {"model": "tiny", "prompt": "a " * 300},
        400,
        "128 positions, which leaves room for 0 response tokens",
    ),
    ("POST", TEXT, {"model": "tiny", "prompt": "a", "max_tokens": 128}, 400, "leaves room for 127 response tokens"),
    ("POST", TEXT, {"model": "tiny", "prompt": "a", "n": 100}, 429, "responses are waiting, and 100 more would"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_answered_is_refused_in_a_sentence(served, method, path, body, status, sentence):
    with serving(served, rows=4, waiting=64) as client:
        got, answer = client.send(path, body, method=method)
        assert got == status and sentence in answer["error"]["message"]
        assert answer["error"]["type"] == ("rate_limit_error" if status == 429 else "invalid_request_error")
        assert client.chat(max_tokens=2)  # the server goes on


def test_a_body_without_its_length_is_refused(client):
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=10) as visitor:
        head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        visitor.sendall(head.encode())
        assert visitor.recv(2**16).startswith(b"HTTP/1.1 411 ")


def test_a_chat_is_asked_as_in_training(client, served):
    answer = client.chat("Hi there", max_tokens=3)
    prompt = prompt_of(served.chat_model, [{"role": "user", "content": "Hi there"}])
    assert answer["usage"]["prompt_tokens"] == len(prompt.flipped_prompt_ids)
    assert served.decode(prompt.flipped_prompt_ids[::-1].tolist()) == "Human: Hi there Assistant:"
    text = client.send(TEXT, {"model": "tiny", "prompt": "Human: Hi there Assistant:", "temperature": 0})[1]
    assert client.text("Hi there", temperature=0) == text["choices"][0]["text"].strip()


def test_the_same_seed_gives_the_same_text_and_the_first_of_several(client):
    one = client.text(seed=5)
    assert client.text(seed=5) == one != client.text(seed=6)
    three = [choice["message"]["content"] for choice in client.chat(seed=5, n=3)["choices"]]
    assert three[0] == one and len(set(three)) == 3
    assert client.text() != client.text()  # without a seed each has its own


def test_prompts_and_samples_are_numbered_prompt_by_prompt(client):
    given = {"model": "tiny", "prompt": ["Hi", "Sing"], "n": 2, "seed": 3, "max_tokens": 6}
    answer = client.send(TEXT, given)[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    first = client.send(TEXT, {**given, "prompt": "Hi"})[1]
    assert [choice["text"] for choice in answer["choices"][:2]] == [choice["text"] for choice in first["choices"]]


def test_a_stream_is_the_whole_in_pieces(client):
    whole = client.chat(seed=5, n=2, logprobs=True, top_logprobs=1)
    given = {"model": "tiny", "messages": HI, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": True}
    status, events = client.send(CHAT, {**given, "stream_options": {"include_usage": True}})
    *chunks, last = map(json.loads, events[:-1])
    assert status == 200 and events[-1] == "[DONE]" and last["usage"] == whole["usage"] and last["choices"] == []
    for place, choice in enumerate(whole["choices"]):
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == place]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        tokens = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]


def test_a_stop_text_ends_an_answer_and_is_not_in_it(client):
    plain = client.chat(seed=5)["choices"][0]
    text = plain["message"]["content"]
    stop = text[4:6]
    answer = client.chat(seed=5, stop=[stop, "never there"])
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)].strip()
    assert answer["choices"][0]["finish_reason"] == "stop" and plain["finish_reason"] == "length"
    status, events = client.send(CHAT, {"model": "tiny", "messages": HI, "seed": 5, "stop": stop, "stream": True})
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert status == 200 and "".join(pieces) == answer["choices"][0]["message"]["content"]


def test_a_texts_logprobs_are_in_openais_older_form(client):
    found = client.send(TEXT, {"model": "tiny", "prompt": "Hi", "temperature": 0, "logprobs": 2, "max_tokens": 5})[1]
    logprobs = found["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    for token, own, others in zip(
        *(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert own == max(others.values()) and token in others


def test_a_hundred_at_once_are_those_asked_alone(served):
    with serving(served, rows=16) as client:
        asked = [(f"Question {number}", {"seed": number, "temperature": number % 3 / 2}) for number in range(100)]
        alone = [client.text(text, **given) for text, given in asked]
        with ThreadPoolExecutor(100) as pool:
            together = list(pool.map(lambda one: client.text(one[0], **one[1]), asked))
    assert together == alone and len(set(alone)) > 50


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(served, stream):
    made = served.make_rows
    with serving(served) as client:
        tokens = {seed: client.chat(seed=seed, max_tokens=100)["usage"]["completion_tokens"] for seed in range(8)}
    seed = next(seed for seed, count in tokens.items() if count > 60)  # which take three seconds

    def slow():
        rows = made()
        step = rows.step
        rows.step = lambda: (time.sleep(0.05), step())
        return rows

    with serving(dataclasses.replace(served, make_rows=slow), rows=1, waiting=4) as client:
        body = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 100, "stream": stream, "seed": seed}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        visitor = socket.create_connection(("127.0.0.1", client.server.port), timeout=10)
        visitor.sendall(head.encode() + body)
        batch, deadline = client.server.service.batch, time.monotonic() + 10
        while not batch.drawing and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batch.drawing == 1
        visitor.close()
        began = time.monotonic()
        while batch.drawing and time.monotonic() < deadline:
            time.sleep(0.01)
        assert batch.drawing == 0 and time.monotonic() - began < 1.5
        assert client.text(max_tokens=2, seed=1) is not None


def test_a_request_that_is_drawn_when_the_server_ends_is_told(served):
    with serving(served, start=False) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.send, CHAT, {"model": "tiny", "messages": HI})
        batch = client.server.service.batch
        while not batch.drawing:
            time.sleep(0.01)
        batch.start()
        batch.close(0)
        status, answer = waiting.result(10)
        assert status in (200, 503)
        status, answer = client.send(CHAT, {"model": "tiny", "messages": HI})
        assert status == 503 and "the server is shutting down" in answer["error"]["message"]


def test_what_a_fault_of_the_program_leaves_is_a_sentence(client, monkeypatch, capsys):
    def fault(*_):
        raise KeyError("a fault")

    monkeypatch.setattr(type(client.server.service.model), "prompts", fault)
    status, answer = client.send(CHAT, {"model": "tiny", "messages": HI})
    assert status == 500 and answer["error"]["message"] == "the server failed; see its log"
    assert answer["error"]["type"] == "server_error" and "a fault" in capsys.readouterr().err


def test_a_family_that_shares_no_batch_answers_without_logprobs(save_model, tiny_tokenizer, capsys):
    folder = save_model("windowed")
    ids = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
    tiny_causal_lm("gemma2", vocab_size=len(tiny_tokenizer), **ids).save_pretrained(folder)
    model = load_served(folder, "tiny", SAMPLING, ChatArguments())
    assert (
        "responses are generated one at a time instead of in a batch, and without logprobs: " in capsys.readouterr().err
    )
    with serving(model) as client:
        alone = [client.text(f"Hi {number}", seed=number, max_tokens=8) for number in range(5)]
        with ThreadPoolExecutor(5) as pool:
            asked = pool.map(lambda number: client.text(f"Hi {number}", seed=number, max_tokens=8), range(5))
        assert list(asked) == alone
        status, answer = client.send(CHAT, {"model": "tiny", "messages": HI, "logprobs": True})
        assert status == 400 and "'logprobs' is not supported for this model family" in answer["error"]["message"]
