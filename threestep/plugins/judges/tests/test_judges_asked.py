"""Judges and reward models behind HTTP: what is sent, what is an answer, failures, and answers without an end."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.scoring_server import (
    judged,
    longer_wins,
    mostly_failing,
    rated_by_length,
    rewards_by_length,
    scoring_server,
)
from threestep.plugins.judges import chat_endpoint, http_reward, service
from threestep.plugins.judges.http_reward import http_reward as server_reward
from threestep.plugins.judges.judge import judge_reward, pairs_of
from threestep.plugins.judges.names import judge_name, server_name
from training.utils.base.credentials import redacted
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import RunPlace, kind_of

RATED = judged(rated_by_length)
ANSWERS = {"judge": RATED, "server": rewards_by_length}  # by kind, an answer
KEY = "sk-of-these-tests-alone"


def rule_of(kind: str, url: str, folder, **changes: Any) -> Callable[..., Any]:
    """A judge, or a reward server."""
    given: dict[str, Any] = {"url": f"{url}/v1/scores"}
    if kind == "judge":
        given = {"model": "tiny", "base_url": f"{url}/v1", "rubric": "Longer is better."}
    path = folder / f"{kind}.yaml"
    path.write_text(json.dumps({**given, "pause": 0.001, **changes}))  # JSON is YAML
    return judge_reward(f"judge:{path}", kind) if kind == "judge" else server_reward(f"http:{path}", kind)


def judge_of(server, folder, **changes):
    return rule_of("judge", server.url, folder, **changes)


def server_of(server, folder, **changes):
    return rule_of("server", server.url, folder, **changes)


# Of both.

both = pytest.mark.parametrize("kind", ANSWERS)


@both
def test_failures_change_nothing_but_time(tmp_path, kind):
    responses = ["a" * number for number in range(40)]
    with scoring_server(ANSWERS[kind], fails=mostly_failing) as server:
        found = rule_of(kind, server.url, tmp_path, **({} if kind == "judge" else {"batch": 1}))(["p"] * 40, responses)
        assert found == [1.0 + number % 10 if kind == "judge" else number / 10 for number in range(40)]
        assert len(server.answered) == 40 and len(server.asked) > 52


@pytest.mark.parametrize(("kind", "how"), [("judge", "silent"), ("server", "silent"), ("server", "drips")])
def test_who_never_answers_ends_the_asking_within_a_bound(tmp_path, kind, how):
    with scoring_server(ANSWERS[kind], **{how: True}) as server:
        rule = rule_of(kind, server.url, tmp_path, retries=1, seconds=0.3)
        began = time.monotonic()
        with pytest.raises(ThreestepError, match=r"no answer within 0.3 seconds \(after 2 requests\)"):
            rule(["p"] * 3, ["a", "b", "c"])
        assert time.monotonic() - began < 5


@both
def test_a_socket_that_notices_first_says_the_same(tmp_path, monkeypatch, kind):
    """Who waits for the answer is late, as on a busy machine."""
    within = service._within
    monkeypatch.setattr(service, "_within", lambda seconds, *others: within(30 * seconds, *others))
    with scoring_server(ANSWERS[kind], silent=True) as server:
        rule = rule_of(kind, server.url, tmp_path, retries=0, seconds=0.2)
        with pytest.raises(ThreestepError, match=r"no answer within 0.2 seconds$"):
            rule(["p"] * 3, ["a", "b", "c"])


GIVEN = {"judge": {"model": "tiny", "base_url": "http://h/v1", "rubric": "x"}, "server": {"url": "http://h/x"}}


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("server", {"url": "ftp://h/x"}, "expects an address such as http://127.0.0.1:8001/v1/scores, got 'ftp://h/x'"),
        (
            "server",
            {"url": "http://me:word@h/x"},
            "the address contains a user, a password or a query; keep keys out of i",
        ),
        ("server", {"url": "http://h/x?key=1"}, "the address contains a user, a password or a query"),
        ("server", {"key": "k"}, "unknown setting 'key'; put the key in a file (key_file)"),
        ("server", {"retrys": 1}, "unknown setting 'retrys'; did you mean 'retries'"),
        ("server", {"batch": 0}, "batch expects 1 or more, got 0"),
        ("server", {"seconds": 0}, "seconds must be a number of seconds above 0, got 0"),
        ("server", {"retries": "3"}, "retries expects a whole number, got '3'"),
        ("server", {"concurrency": True}, "concurrency expects a whole number, got True"),
        ("server", {"most_tokens": 9}, "most_tokens limits what a judge generates"),
        ("server", {"key_file": "a", "key_variable": "B"}, "key_variable and key_file both specify the key"),
        ("server", '{"batch": 1}', "has no setting 'url'; add it"),
        ("server", '["http://h/x"]', "expects settings as NAME: VALUE, got list"),
        ("server", "url: [", "server.yaml is not valid YAML: while parsing"),
        ("judge", {"fields": {"stream": True, "n": 2}}, "fields must not contain stream, n, which the judge"),
        ("judge", {"max_tokens": 0}, "max_tokens expects 1 or more"),
        ("judge", {"scale": "1-5"}, "scale expects a list, got '1-5'"),
        ("judge", {"base_url": "localhost"}, "expects an address such as"),
        ("judge", '{"base_url": "http://h/v1", "rubric": "x"}', "has no setting 'model'"),
        ("judge", '{"base_url": "http://h/v1", "model": "x"}', "has no setting 'rubric'"),
    ],
)
def test_mistakes_of_the_file_are_sentences(tmp_path, kind, changes, sentence):
    path = tmp_path / f"{kind}.yaml"
    path.write_text(changes if isinstance(changes, str) else json.dumps({**GIVEN[kind], **changes}))
    read, flag = (judge_reward, "judge") if kind == "judge" else (server_reward, "http")
    with pytest.raises(ThreestepError) as found:
        read(f"{flag}:{path}", kind)
    assert sentence in str(found.value) and f"--reward {flag}:" in str(found.value)


def test_a_file_that_is_not_there_and_a_key_that_is_not_there(tmp_path):
    with pytest.raises(ThreestepError, match="cannot read the YAML file .No such file or directory"):
        server_reward("http:none.yaml", "none")
    with pytest.raises(ThreestepError, match="key_variable reads the key from NOT_THERE, which is not set; export"):
        rule_of("server", "http://h", tmp_path, key_variable="NOT_THERE").check(None)


# Of a reward model.


def test_each_pair_is_sent_once_with_its_reference_and_messages(tmp_path):
    with scoring_server(rewards_by_length) as server:
        rule = server_of(server, tmp_path, batch=3, concurrency=2)
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
        rule = server_of(server, tmp_path, retries=2)
        with pytest.raises(ThreestepError, match=f"the reward 'server' has no verdict on prompt 'p'.*{reason}.*after"):
            rule(["p", "q"], ["a", "b"])
        assert len(server.asked) == 3


def test_a_mistake_is_not_asked_again_and_nobody_listens(tmp_path):
    for status, times in ((400, 1), (401, 1), (404, 1), (302, 1), (408, 3), (429, 3), (503, 3)):
        with scoring_server(rewards_by_length, fails=lambda number, status=status: status) as server:
            rule = server_of(server, tmp_path, retries=2)
            with pytest.raises(ThreestepError, match=f"the server answered {status}: "):
                rule(["p"], ["a"])
            assert len(server.asked) == times
    with scoring_server(rewards_by_length) as server:
        rule = server_of(server, tmp_path, retries=1)
    with pytest.raises(ThreestepError, match=r"no answer from http://127.0.0.1:\d+/v1/scores: .*refused"):
        rule(["p"], ["a"])


def test_the_key_is_sent_and_stands_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("THREESTEP_API_KEY", KEY)
    with scoring_server(rewards_by_length, fails=lambda number: 400) as server:  # which repeats all headers
        rule = server_of(server, tmp_path)
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"failed, Bearer \*\*\*") as found:
            rule(["p"], ["a"])
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    log = (tmp_path / "run" / "verdicts" / "server.rank0.jsonl").read_text()
    assert '"failed"' in log and KEY not in log + str(found.value) and redacted(f"so {KEY}.") == "so ***."
    monkeypatch.setenv("THE_KEY", f"{KEY}-2")
    with scoring_server(rewards_by_length) as server:
        server_of(server, tmp_path, key_variable="THE_KEY")(["p"], ["a"])
        (tmp_path / "key").write_text(f"{KEY}-3\n")
        server_of(server, tmp_path, key_file=str(tmp_path / "key"))(["p"], ["a"])
        assert [headers["authorization"] for headers in server.headers] == [f"Bearer {KEY}-2", f"Bearer {KEY}-3"]


def test_addresses_and_their_names():
    names = {
        "http:http://127.0.0.1:8001/v1/scores": "127.0.0.1_8001",
        "http://box:80/x": "box_80",
        "https://rm.example.org/score": "rm.example.org",
        "http:servers/big.yaml": "big",
    }
    assert judge_name("judge:rubrics/helpful.yaml") == "helpful"
    assert {given: server_name(given) for given in names} == names and all(map(kind_of, names))
    assert not kind_of("model") and not kind_of("httpd.py:score")
    for given in ("http:http://127.0.0.1:9/x", "http://127.0.0.1:9/x"):
        assert server_reward(given, "n")._http.url == "http://127.0.0.1:9/x"


# Of a judge.


def test_each_response_is_rated_once(tmp_path):
    with scoring_server(RATED) as server:
        rule = judge_of(server, tmp_path, system="Be strict.", fields={"seed": 3, "top_k": 1})
        rule.open(RunPlace(tmp_path / "run"))
        assert rule(["p", "p", "q"], ["aa", "aa", "a" * 12], ground_truth=["x", "x", "y"]) == [3.0, 3.0, 3.0]
        assert len(server.asked) == 2
        body = server.asked[0]
        assert body["messages"][0] == {"role": "system", "content": "Be strict."}
        assert {name: value for name, value in body.items() if name != "messages"} == {
            "model": "tiny", "temperature": 0.0, "max_tokens": 1024, "seed": 3, "top_k": 1,
        }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/verdicts/judge.rank0.jsonl").read_text().splitlines()]
    assert {line["value"] for line in lines} == {3.0} and lines[0]["tokens"] == 12
    assert lines[0]["reply"].endswith("[[3]]") and lines[0]["asked"]["messages"] == body["messages"] or lines[1]


def test_prompts_of_messages_are_shown_as_their_texts(tmp_path):
    with scoring_server(RATED) as server:
        rule = judge_of(server, tmp_path, concurrency=1)
        one = [{"role": "user", "content": "Hi"}]
        rule(["<s>Hi", "<s>Yo"], ["a", "b"], prompt_messages=[one, [*one, {"role": "assistant", "content": "Ho"}]])
        texts = [body["messages"][0]["content"] for body in server.asked]
        assert "[The question]\nHi\n[The end" in texts[0]
        assert "[The question]\nuser: Hi\n\nassistant: Ho\n[The end" in texts[1]


def test_swapped_orders_give_symmetric_scores(tmp_path):
    """Also of a judge that prefers what stands first: of equal lengths it takes A, which makes a draw."""
    pairs = [("p", "long one", "short"), ("p", "short", "long one"), ("p", "abcd", "efgh"), ("p", "same", "same")]
    with scoring_server(judged(longer_wins)) as server:
        rule = judge_of(server, tmp_path, form="pairwise")
        assert rule.shares(pairs, [None] * 4) == [1.0, 0.0, 0.5, 0.5]
        assert len(server.asked) == 4  # two orders of two pairs: a swapped pair is the same, an equal one is not asked
    with scoring_server(judged(lambda question: "[[A]]")) as server:
        rule = judge_of(server, tmp_path, form="pairwise")
        assert rule.shares(pairs, [None] * 4) == [0.5] * 4


def test_a_group_gets_shares_of_wins(tmp_path):
    with scoring_server(judged(longer_wins)) as server:
        rule = judge_of(server, tmp_path, form="pairwise")
        prompts, responses = ["p"] * 3 + ["q"] * 2 + ["r"], ["a", "aaa", "aa", "b", "bb", "c"]
        assert rule(prompts, responses) == [0.0, 1.0, 0.5, 0.0, 1.0, None]  # the last has nobody beside it
        assert len(server.asked) == 2 * (3 + 1)
        assert sum(rule(["p"] * 3, responses[:3])) == 1.5
        few = judge_of(server, tmp_path, form="pairwise", opponents=1)
        assert few(["s"] * 4, ["a", "aa", "aaa", "aaaa"]) == [0.0, 0.5, 0.5, 1.0]


def test_against_the_reference(tmp_path):
    with scoring_server(judged(longer_wins)) as server:
        rule = judge_of(server, tmp_path, form="pairwise", against="ground_truth")
        assert rule(["p", "p"], ["aaa", "a"], ground_truth=["bb", "bb"]) == [1.0, 0.0]
        with pytest.raises(ThreestepError, match="shows the judge each row's ground_truth, but the row with the"):
            rule(["p"], ["a"], ground_truth=[None])


def test_each_pair_of_a_group_once():
    assert pairs_of([4, 5, 6], None) == [(4, 5), (5, 6), (4, 6)]
    assert sorted(pairs_of(range(4), None)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert sorted(pairs_of(range(5), 1)) == [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    assert pairs_of([3], None) == [] and pairs_of([3, 4], 5) == [(3, 4)]


@pytest.mark.parametrize("reply", ["I cannot say.", "[[99]]", ""])
def test_a_reply_without_a_verdict_is_no_score(tmp_path, reply):
    with scoring_server(judged(lambda question: reply)) as server:
        rule = judge_of(server, tmp_path, retries=2)
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"has no verdict on prompt 'p'.*: the reply has no verdict.*after 3"):
            rule(["p"], ["a"])
        assert len(server.asked) == 3
    [line] = (tmp_path / "run/verdicts/judge.rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] == 36 and "value" not in json.loads(line)


def test_a_bound_on_tokens_wants_them_counted(tmp_path):
    with scoring_server(judged(rated_by_length, tokens=None)) as server:
        assert judge_of(server, tmp_path)(["p"], ["a"]) == [2.0]
        with pytest.raises(ThreestepError, match="most_tokens needs the field 'usage' in replies"):
            judge_of(server, tmp_path, most_tokens=100)(["p"], ["a"])
        assert len(server.asked) == 2


def test_the_key_is_the_files_and_the_environments_others_are_not_sent(tmp_path, monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "of-openai-alone")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Other: of-openai-alone")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with scoring_server(RATED) as server:
        judge_of(server, tmp_path)(["p"], ["a"])
        judge_of(server, tmp_path, key_variable="JUDGE_KEY")(["p"], ["a"])
        assert [headers.get("authorization") for headers in server.headers] == [None, f"Bearer {KEY}"]
        assert "of-openai-alone" not in json.dumps(server.headers)
    with scoring_server(RATED, fails=lambda number: 401) as server:
        rule = judge_of(server, tmp_path, key_variable="JUDGE_KEY")
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"the server answered 401: .*Bearer \*\*\*") as found:
            rule(["p"], ["a"])
        assert len(server.asked) == 1 and KEY not in str(found.value)
    with scoring_server(judged(lambda question: f"I was asked with {KEY}. [[3]]")) as server:
        rule = judge_of(server, tmp_path, key_variable="JUDGE_KEY")
        rule.open(RunPlace(tmp_path / "run"))
        assert rule(["p"], ["a"]) == [3.0]
    log = (tmp_path / "run/verdicts/judge.rank0.jsonl").read_text()
    assert KEY not in log and "I was asked with ***." in log


# Answers that have no end, or come compressed, cost little and end soon; their threads end too.

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SECONDS = 1.0


@contextlib.contextmanager
def sending(*parts: bytes, pause: float = 0.0) -> Iterator[str]:
    """The address of a server that answers each request with these parts, the last one again and again."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            for part in parts:
                connection.sendall(part)
            while pause >= 0:
                connection.sendall(parts[-1])
                time.sleep(pause)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):  # closed before all of the request was read, it would be reset
                pass

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listening.accept()[0]], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def failure(kind: str, url: str, folder) -> str:
    """What is said of a question that has no answer."""
    rule = rule_of(kind, url, folder, retries=0, seconds=SECONDS)
    with pytest.raises(ThreestepError) as found:
        rule(["p"], ["a"])
    return str(found.value)


def all_have_ended(seconds: float = 3 * SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while (
        left := [each for each in threading.enumerate() if each.name == "a request"]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


@both
def test_an_answer_without_an_end_is_given_up(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "_MOST_BYTES", 2**20)
    monkeypatch.setattr(http_reward, "_MOST_BYTES", 2**20)
    with sending(HEAD + b"\r\n", b" " * 2**16) as url:
        assert "the answer has more than 1,048,576 bytes" in failure(kind, url, tmp_path)
    assert all_have_ended()


LENGTH = b"Content-Length: 99999\r\n\r\n"


@pytest.mark.parametrize(
    "parts",
    [(HEAD + LENGTH, b" "), (HEAD.replace(b"200 OK", b"400 Bad Request") + LENGTH, b" "), (HEAD, b"X-More: 1\r\n")],
    ids=["answer", "refusal", "headers"],
)
@both
def test_what_drips_is_left(tmp_path, kind, parts):
    with sending(*parts, pause=0.1) as url:
        assert "no answer within 1 seconds" in failure(kind, url, tmp_path)
        assert all_have_ended(), "while it still drips"


@both
def test_what_comes_compressed_is_not_undone(tmp_path, kind):
    packed = gzip.compress(b" " * 2**26, 1)
    with sending(
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed, pause=-1
    ) as url:
        tracemalloc.start()
        said = failure(kind, url, tmp_path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "the answer is not JSON" in said and most < 2**24


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"rewards": [%s]}' % (b"9" * 5000), b'{"choices": [%s1]}' % (b"[" * 9)]
)
@both
def test_values_on_many_levels_and_long_numbers_are_failures(tmp_path, kind, body):
    with sending(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, pause=-1) as url:
        assert "has no verdict on prompt 'p'" in failure(kind, url, tmp_path)


@pytest.mark.parametrize("after", ["²", "9" * 5000, "-1", "soon"])
@both
def test_a_wait_that_is_no_number_is_none(tmp_path, kind, after):
    answer = f"HTTP/1.1 429 Slow\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    with sending(answer, pause=-1) as url:
        assert "the server answered 429: Slow" in failure(kind, url, tmp_path)
