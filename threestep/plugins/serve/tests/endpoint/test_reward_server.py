"""A served reward model: its scores are those of the model, by tokens or by texts; who is answered, and what is
refused."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import threading

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_scalar_model
from threestep.plugins.evaluation.model import start_alone
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.serve.endpoint.reward_server import SCORES, RewardServer, load_served_reward
from training.utils.data.arguments import DataArguments
from training.utils.data.rows.arguments import ChatArguments

KEY = "a-key-of-the-tests"
PROMPTS = ["Human: Hi Assistant:", "Human: Sort: pear fig Assistant:"]
RESPONSES = [" fig pear", " 5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    place = tmp_path_factory.mktemp("reward") / "rm"
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.init_kwargs["threestep"] = {"prompt_style": "human_assistant"}
    return save_pair(place, tokenizer, tiny_scalar_model)


@pytest.fixture(scope="module")
def served(folder):
    return load_served_reward(folder, "rm", None, ChatArguments())


@contextlib.contextmanager
def serving(served):
    server = RewardServer(0, served, KEY, 2**16)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.close_when_quiet()
        thread.join()


def sent(server, body, key=KEY, path=SCORES, method=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    text = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, text, {"Authorization": f"Bearer {key}"})
    with contextlib.closing(connection):
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_scores_are_those_of_the_model(folder, served):
    scorer = load_answer_scorer(folder, None, DataArguments(chat=ChatArguments()), start_alone())
    pairs = [scorer.ids_of_text(prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    own = scorer.score_ids([prompt for prompt, _ in pairs], [response for _, response in pairs])
    texts = {"prompts": PROMPTS, "responses": RESPONSES, "query": ["", ""], "labels": [None, "x"]}
    cut = [response[:-1] for _, response in pairs]  # without its end
    of_cut = scorer.score_ids([prompt for prompt, _ in pairs], cut)
    ids = {"prompt_ids": [prompt for prompt, _ in pairs], "response_ids": cut}
    with serving(served) as server:
        status, answer = sent(server, texts)
        assert status == 200 and answer["rewards"] == pytest.approx(own, abs=1e-5) and answer["model"] == "rm"
        assert sent(server, {**texts, **ids, "tokenizer": served.tokenizer})[1]["rewards"] == pytest.approx(
            of_cut, abs=1e-5
        )
        assert own != pytest.approx(of_cut, abs=1e-2)
        assert sent(server, {**texts, **ids, "tokenizer": "another"})[1] == answer
        messages = [[{"role": "user", "content": "Hi"}], None]
        assert sent(server, {**texts, "prompts": ["other", PROMPTS[1]], "messages": messages})[1]["rewards"] == (
            pytest.approx(own, abs=1e-5)
        )
        assert sent(server, texts)[1] == answer  # to the bit
        assert sent(server, None, path="/v1/models")[1]["data"][0]["id"] == "rm"


def test_nobody_without_the_key_is_answered(served):
    with serving(served) as server:
        for key in ("", KEY[:-1], f"{KEY}x"):
            assert sent(server, {"prompts": PROMPTS, "responses": RESPONSES}, key=key)[0] == 401


ONE = {"prompts": ["p"], "responses": ["r"]}
REFUSED = [
    (SCORES, None, 405, "/v1/scores takes no GET"),
    ("/v1/models", ONE, 405, "/v1/models takes no POST"),
    ("/v2", ONE, 404, "there is no /v2 here, but /v1/scores and /v1/models"),
    (SCORES, b"{", 400, "the body expects JSON: "),
    (SCORES, [], 400, "the body expects an object with 'prompts' and 'responses'"),
    (SCORES, {**ONE, "nonsense": 1}, 400, "'nonsense' is not honoured here; leave it out"),
    (SCORES, {**ONE, "model": "other"}, 404, "there is no model 'other' here, but 'rm'"),
    (SCORES, {"prompts": [], "responses": []}, 400, "'responses' expects a list of 1 to 1024 texts"),
    (SCORES, {**ONE, "responses": [1]}, 400, "'responses' expects a list with an entry for each of the 1 responses"),
    (SCORES, {**ONE, "prompts": ["p", "q"]}, 400, "'prompts' expects a list with an entry for each of the 1 responses"),
    (SCORES, {**ONE, "messages": ["p"]}, 400, "'messages' expects a list with an entry for each of the 1 responses"),
    (SCORES, {**ONE, "messages": [[{"role": "x"}]]}, 400, "the conversation"),
    (SCORES, {**ONE, "response_ids": [[1]]}, 400, "'prompt_ids' and 'response_ids' are given together"),
    (SCORES, {**ONE, "responses": ["a " * 300]}, 400, "tokens with its prompt, and the model reads 128; shorten them"),
]


@pytest.mark.parametrize(("path", "body", "status", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_answered_is_refused_in_a_sentence(served, path, body, status, sentence):
    with serving(served) as server:
        got, answer = sent(server, body, path=path)
        assert got == status and sentence in answer["error"]["message"]
        assert sent(server, {"prompts": PROMPTS, "responses": RESPONSES})[0] == 200  # the server goes on


def test_ids_beyond_the_vocabulary_are_refused(served):
    body = {**ONE, "prompt_ids": [[1]], "response_ids": [[10**6]], "tokenizer": served.tokenizer}
    with serving(served) as server:
        status, answer = sent(server, body)
        assert status == 400 and "expect lists of ids from 0 to" in answer["error"]["message"]
