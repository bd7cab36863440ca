"""A reward model behind HTTP: what is sent, what is taken for an answer, and what no failure changes."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.scoring_server import mostly_failing, rewards_by_length, scoring_server
from threestep.plugins.judges import service
from threestep.plugins.judges.http_reward import http_reward
from threestep.plugins.judges.names import server_name
from training.utils.base.credentials import redacted
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import RunPlace, kind_of

PROMPTS = [f"prompt {number // 2}" for number in range(40)]
RESPONSES = ["a" * number for number in range(40)]
SCORES = [number / 10 for number in range(40)]
KEY = "sk-of-these-tests-alone"


def rule_of(server, tmp_path, **changes):
    settings = {"url": f"{server.url}/v1/scores", "pause": 0.001, **changes}
    path = tmp_path / "server.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return http_reward(f"http:{path}", "server")


def test_each_pair_is_sent_once_with_its_reference_and_messages(tmp_path):
    with scoring_server(rewards_by_length) as server:
        rule = rule_of(server, tmp_path, batch=3, concurrency=2)
        rule.open(RunPlace(tokenizer="of the run"))
        messages = [{"role": "user", "content": "Hi"}]
        columns = {"ground_truth": ["r", None, 3, "s"], "prompt_messages": [messages, None, None, None]}
        columns |= {"prompt_ids": [[1], [2], [3], [1]], "response_ids": [[4], [5, 6], [7], [4]], "other": [1] * 4}
        found = rule(["p", "q", "s", "p"], ["a", "bb", "ccc", "a"], **columns)
        assert found == [0.1, 0.2, 0.3, 0.1]
        assert sorted(len(body["responses"]) for body in server.asked) == [1, 3]  # the last pair has another reference
        [first] = [body for body in server.asked if len(body["responses"]) == 3]
        assert first == {
            "prompts": ["p", "q", "s"], "responses": ["a", "bb", "ccc"], "query": ["pa", "qbb", "sccc"],
            "labels": ["r", None, "3"], "messages": [messages, None, None],
            "prompt_ids": [[1], [2], [3]], "response_ids": [[4], [5, 6], [7]], "tokenizer": "of the run",
        }  # fmt: skip
        assert rule(["q"], ["bb"], **{name: [values[1]] for name, values in columns.items()}) == [0.2]
        assert len(server.asked) == 2  # nothing is asked twice


def test_failures_change_nothing_but_time(tmp_path):
    with scoring_server(rewards_by_length, fails=mostly_failing) as server:
        rule = rule_of(server, tmp_path, batch=1)
        assert rule(PROMPTS, RESPONSES) == SCORES
        assert len(server.answered) == len(RESPONSES) and len(server.asked) > len(RESPONSES) + 12


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"rewards": [1.0]}, r"expected {'rewards': \[..\]} with 2 numbers, got 1"),
        ({"rewards": [1.0, None]}, "expected numbers that are finite in float32, got None"),
        ({"rewards": [1.0, True]}, "expected numbers that are finite in float32, got True"),
        ({"rewards": [1e39, 0]}, "expected numbers that are finite in float32, got 1e"),
        (b'{"rewards": [NaN, 1]}', "expected numbers that are finite in float32, got nan"),
        ({"scores": [1.0, 2.0]}, r"expected {'rewards': \[..\]} with 2 numbers, got {'scores': \[1.0, 2.0\]}"),
        (b"<html>", "the answer is not JSON"),
    ],
)
def test_what_cannot_be_read_is_asked_again_and_never_a_score(tmp_path, answer, reason):
    with scoring_server(lambda body: answer) as server:
        rule = rule_of(server, tmp_path, retries=2)
        with pytest.raises(ThreestepError, match=f"the reward 'server' has no verdict on prompt 'p'.*{reason}.*after"):
            rule(["p", "q"], ["a", "b"])
        assert len(server.asked) == 3


def test_a_mistake_is_not_asked_again(tmp_path):
    for status, times in ((400, 1), (401, 1), (404, 1), (302, 1), (408, 3), (429, 3), (503, 3)):
        with scoring_server(rewards_by_length, fails=lambda number, status=status: status) as server:
            rule = rule_of(server, tmp_path, retries=2)
            with pytest.raises(ThreestepError, match=f"the server answered {status}: "):
                rule(["p"], ["a"])
            assert len(server.asked) == times


@pytest.mark.parametrize("kind", ["silent", "drips"])
def test_a_server_that_never_answers_ends_within_a_bound(tmp_path, kind):
    with scoring_server(rewards_by_length, **{kind: True}) as server:
        rule = rule_of(server, tmp_path, retries=1, seconds=0.3, batch=1)
        began = time.monotonic()
        with pytest.raises(ThreestepError, match=r"no answer within 0.3 seconds \(after 2 requests\)"):
            rule(PROMPTS, RESPONSES)
        assert time.monotonic() - began < 5


def test_a_socket_that_notices_first_says_the_same(tmp_path, monkeypatch):
    """Who waits for the answer is late, as on a busy machine."""
    within = service._within
    monkeypatch.setattr(service, "_within", lambda seconds, *others: within(30 * seconds, *others))
    with scoring_server(rewards_by_length, silent=True) as server:
        rule = rule_of(server, tmp_path, retries=0, seconds=0.2)
        with pytest.raises(ThreestepError, match=r"no answer within 0.2 seconds$"):
            rule(PROMPTS, RESPONSES)


def test_nobody_listens(tmp_path):
    with scoring_server(rewards_by_length) as server:
        rule = rule_of(server, tmp_path, retries=1)
    with pytest.raises(ThreestepError, match=r"no answer from http://127.0.0.1:\d+/v1/scores: .*refused"):
        rule(["p"], ["a"])


def test_the_key_is_sent_and_stands_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("THREESTEP_API_KEY", KEY)
    with scoring_server(rewards_by_length, fails=lambda number: 400) as server:  # which repeats all headers
        rule = rule_of(server, tmp_path)
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"failed, Bearer \*\*\*") as found:
            rule(["p"], ["a"])
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    log = (tmp_path / "run" / "verdicts" / "server.rank0.jsonl").read_text()
    assert '"failed"' in log and KEY not in log + str(found.value) and redacted(f"so {KEY}.") == "so ***."
    monkeypatch.setenv("THE_KEY", f"{KEY}-2")
    with scoring_server(rewards_by_length) as server:
        rule_of(server, tmp_path, key_variable="THE_KEY")(["p"], ["a"])
        (tmp_path / "key").write_text(f"{KEY}-3\n")
        rule_of(server, tmp_path, key_file=str(tmp_path / "key"))(["p"], ["a"])
        assert [headers["authorization"] for headers in server.headers] == [f"Bearer {KEY}-2", f"Bearer {KEY}-3"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"url": "ftp://h/x"}, "expects an address such as http://127.0.0.1:8001/v1/scores, got 'ftp://h/x'"),
        ({"url": "http://me:word@h/x"}, "the address has a user, a password or a query; a key stands in a file or in"),
        ({"url": "http://h/x?key=1"}, "the address has a user, a password or a query"),
        ({"url": "http://h/x", "key": "k"}, "unknown setting 'key'; a key stands in a file or in the environment"),
        ({"url": "http://h/x", "retrys": 1}, "unknown setting 'retrys'; did you mean 'retries'"),
        ({"batch": 1}, "expects url, and has none; add it"),
        ({"url": "http://h/x", "batch": 0}, "batch expects 1 or more, got 0"),
        ({"url": "http://h/x", "seconds": 0}, "seconds expects a number of seconds above 0, got 0"),
        ({"url": "http://h/x", "retries": "3"}, "retries expects a whole number, got '3'"),
        ({"url": "http://h/x", "concurrency": True}, "concurrency expects a whole number, got True"),
        ({"url": "http://h/x", "most_tokens": 9}, "most_tokens counts what a judge writes"),
        ({"url": "http://h/x", "key_file": "a", "key_variable": "B"}, "key_variable and key_file both name the key"),
        (["http://h/x"], "expects settings as NAME: VALUE, got list"),
    ],
)
def test_mistakes_of_the_file_are_sentences(tmp_path, given, sentence):
    (tmp_path / "server.yaml").write_text(json.dumps(given))
    with pytest.raises(ThreestepError) as found:
        http_reward(f"http:{tmp_path / 'server.yaml'}", "server")
    assert sentence in str(found.value) and "--reward http:" in str(found.value)


def test_a_file_that_is_not_there_and_a_key_that_is_not_there(tmp_path):
    with pytest.raises(ThreestepError, match="expects a YAML file, got: No such file or directory"):
        http_reward("http:none.yaml", "none")
    (tmp_path / "bad.yaml").write_text("url: [")
    with pytest.raises(ThreestepError, match="bad.yaml expects YAML: while parsing"):
        http_reward(f"http:{tmp_path / 'bad.yaml'}", "bad")
    (tmp_path / "server.yaml").write_text("url: http://h/x\nkey_variable: NOT_THERE")
    with pytest.raises(ThreestepError, match="key_variable expects the key in NOT_THERE, which is not in the environm"):
        http_reward(f"http:{tmp_path / 'server.yaml'}", "server").check(None)


def test_addresses_and_their_names():
    names = {
        "http:http://127.0.0.1:8001/v1/scores": "127.0.0.1_8001",
        "http://box:80/x": "box_80",
        "https://rm.example.org/score": "rm.example.org",
        "http:servers/big.yaml": "big",
    }
    assert {given: server_name(given) for given in names} == names and all(map(kind_of, names))
    assert not kind_of("model") and not kind_of("httpd.py:score")
    for given in ("http:http://127.0.0.1:9/x", "http://127.0.0.1:9/x"):
        assert http_reward(given, "n")._http.url == "http://127.0.0.1:9/x"
