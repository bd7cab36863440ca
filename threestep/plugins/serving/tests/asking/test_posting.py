"""JSON to a server and back; what is no answer is a failed request that says whether another may do better."""

from __future__ import annotations

import pytest

from tests.support.scoring_server import rewards_by_length, scoring_server
from threestep.plugins.serving.asking.failures import FailedRequest
from threestep.plugins.serving.asking.posting import Post

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
