"""A served reward model: its scores are those of the model, by tokens or by texts; who is answered, and what is
refused."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest

from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_scalar_model
from threestep.plugins.evaluation.model import start_alone
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.serve.endpoint.reward_server import SCORES, RewardServer, load_served_reward
from threestep.plugins.serve.tests.endpoint.conftest import KEY, Client
from training.utils.data.arguments import DataArguments
from training.utils.data.rows.arguments import ChatArguments

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
        yield Client(server)
    finally:
        server.shutdown()
        server.close_when_quiet()
        thread.join()


def test_scores_are_those_of_the_model(folder, served):
    scorer = load_answer_scorer(folder, None, DataArguments(chat=ChatArguments()), start_alone())
    pairs = [scorer.ids_of_text(prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    own = scorer.score_ids([prompt for prompt, _ in pairs], [response for _, response in pairs])
    texts = {"prompts": PROMPTS, "responses": RESPONSES, "query": ["", ""], "labels": [None, "x"]}
    cut = [response[:-1] for _, response in pairs]  # without its end
    of_cut = scorer.score_ids([prompt for prompt, _ in pairs], cut)
    ids = {"prompt_ids": [prompt for prompt, _ in pairs], "response_ids": cut}
    with serving(served) as client:
        status, answer = client.send(SCORES, texts)
        assert status == 200 and answer["rewards"] == pytest.approx(own, abs=1e-5) and answer["model"] == "rm"
        found = client.send(SCORES, {**texts, **ids, "tokenizer": served.tokenizer})[1]["rewards"]
        assert found == pytest.approx(of_cut, abs=1e-5)
        assert own != pytest.approx(of_cut, abs=1e-2)
        assert client.send(SCORES, {**texts, **ids, "tokenizer": "another"})[1] == answer
        messages = [[{"role": "user", "content": "Hi"}], None]
        found = client.send(SCORES, {**texts, "prompts": ["other", PROMPTS[1]], "messages": messages})[1]["rewards"]
        assert found == pytest.approx(own, abs=1e-5)
        assert client.send(SCORES, texts)[1] == answer  # to the bit
        beyond = {"prompt_ids": [[1]] * 2, "response_ids": [[10**6]] * 2, "tokenizer": served.tokenizer}
        status, answer = client.send(SCORES, {**texts, **beyond})
        assert status == 400 and "must be lists of ids from 0 to" in answer["error"]["message"]
        assert client.send("/v1/models")[1]["data"][0]["id"] == "rm"


def test_nobody_without_the_key_is_answered(served):
    with serving(served) as client:
        for key in ("", KEY[:-1], f"{KEY}x"):
            assert client.send(SCORES, {"prompts": PROMPTS, "responses": RESPONSES}, key=key)[0] == 401


ONE = {"prompts": ["p"], "responses": ["r"]}
REFUSED = [
    (SCORES, None, 405, "/v1/scores takes no GET"),
    ("/v1/models", ONE, 405, "/v1/models takes no POST"),
    ("/v2", ONE, 404, "there is no /v2; this server has /v1/scores and /v1/models"),
    (SCORES, b"{", 400, "the body must be JSON: "),
    (SCORES, [], 400, "the body must be an object with 'prompts' and 'responses'"),
    (SCORES, {**ONE, "nonsense": 1}, 400, "'nonsense' is not supported; leave it out"),
    (SCORES, {**ONE, "model": "other"}, 404, "there is no model 'other'; this server has 'rm'"),
    (SCORES, {"prompts": [], "responses": []}, 400, "'responses' must be a list of 1 to 1024 texts"),
    (SCORES, {**ONE, "responses": [1]}, 400, "'responses' must be a list with one entry for each of the 1 responses"),
    (
        SCORES,
        {**ONE, "prompts": ["p", "q"]},
        400,
        "'prompts' must be a list with one entry for each of the 1 responses",
    ),
    (SCORES, {**ONE, "messages": ["p"]}, 400, "'messages' must be a list with one entry for each of the 1 responses"),
    (SCORES, {**ONE, "messages": [[{"role": "x"}]]}, 400, "the conversation"),
    (SCORES, {**ONE, "response_ids": [[1]]}, 400, "'prompt_ids' and 'response_ids' must be given together"),
    (
        SCORES,
        {**ONE, "responses": ["a " * 300]},
        400,
        "tokens including its prompt, but the model reads at most 128; shorten them",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_answered_is_refused_in_a_sentence(served, path, body, status, sentence):
    with serving(served) as client:
        got, answer = client.send(path, body)
        assert got == status and sentence in answer["error"]["message"]
        assert client.send(SCORES, {"prompts": PROMPTS, "responses": RESPONSES})[0] == 200  # the server goes on
