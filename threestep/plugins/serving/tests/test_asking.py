"""Asking a service: numbers have bounds, an address holds no secret, and what is no answer is a failed request."""

from __future__ import annotations

import pytest

from tests.support.scoring_server import rewards_by_length, scoring_server
from threestep.plugins.serving.asking.failures import FailedRequest
from threestep.plugins.serving.asking.posting import Post
from threestep.plugins.serving.asking.settings import AskSettings, check_url, is_this_machine
from training.utils.base.errors import Mistakes, ThreestepError

pytestmark = pytest.mark.unit


def test_settings_without_mistakes_have_none():
    mistakes = Mistakes()
    AskSettings(retries=0, most_requests=None, key_file="key").check("judge.yaml", mistakes)
    mistakes.raise_if_any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": 0}, "judge.yaml: concurrency must be at least 1, got 0"),
        ({"retries": -1}, "judge.yaml: retries must be at least 0, got -1"),
        ({"seconds": 0.0}, "judge.yaml: seconds must be a number of seconds above 0, got 0.0"),
        ({"key_variable": "KEY", "key_file": "key"}, "key_variable and key_file both specify the key"),
    ],
)
def test_each_mistake_is_named(given, said):
    mistakes = Mistakes()
    AskSettings(**given).check("judge.yaml", mistakes)
    with pytest.raises(ThreestepError, match=said):
        mistakes.raise_if_any()


@pytest.mark.parametrize("url", ["localhost:1", "ftp://a/b", "http://", "http://a:0x1", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ThreestepError, match="--reward expects an address such as http://127.0.0.1:8001/v1/scores"):
        check_url(url, "--reward")


@pytest.mark.parametrize("url", ["http://me:secret@a/b", "http://a/b?key=secret"])
def test_an_address_holds_no_secret(url):
    with pytest.raises(ThreestepError, match="--reward: the address contains a user, a password or a query"):
        check_url(url, "--reward")


def test_addresses_of_this_machine():
    assert is_this_machine("http://127.0.0.1:80/x") and is_this_machine("http://[::1]/")
    assert not is_this_machine("http://example.com/localhost")


BODY = {"prompts": ["a"], "responses": ["bcd"]}


def test_an_answer_is_read():
    with scoring_server(rewards_by_length) as server:
        assert Post(f"{server.url}/v1/scores", "a-key").answer(BODY, 30.0) == rewards_by_length(BODY)
        assert server.answered == [BODY] and server.headers[0]["authorization"] == "Bearer a-key"


@pytest.mark.parametrize(("code", "is_final"), [(500, False), (429, False), (404, True)])
def test_a_refusal_says_whether_another_request_may_do_better(code, is_final):
    with scoring_server(rewards_by_length, fails=lambda number: code) as server:
        with pytest.raises(FailedRequest, match=f"the server answered {code}") as raised:
            Post(f"{server.url}/v1/scores", None).answer(BODY, 30.0)
    assert raised.value.is_final == is_final


def test_nobody_listens_and_an_answer_may_be_too_long():
    with scoring_server(rewards_by_length) as server:
        with pytest.raises(FailedRequest, match="the answer has more than 4 bytes"):
            Post(f"{server.url}/v1/scores", None, 4).answer(BODY, 30.0)
    with pytest.raises(FailedRequest, match="no answer from http"):
        Post("http://127.0.0.1:9/x", None).answer(BODY, 5.0)
