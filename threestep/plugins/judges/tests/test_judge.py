"""A judge behind a chat endpoint, and a server in this process."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.scoring_server import judged, longer_wins, mostly_failing, rated_by_length, scoring_server
from threestep.plugins.judges import service
from threestep.plugins.judges.judge import judge_reward, pairs_of
from threestep.plugins.judges.names import judge_name
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import RunPlace

KEY = "sk-of-the-tests-of-judges"


def rule_of(server, tmp_path, **changes):
    settings = {"model": "tiny", "base_url": f"{server.url}/v1", "rubric": "Longer is better.", "pause": 0.001}
    path = tmp_path / "judge.yaml"
    path.write_text(json.dumps({**settings, **changes}))
    return judge_reward(f"judge:{path}", "judge")


def test_each_response_is_rated_once(tmp_path):
    with scoring_server(judged(rated_by_length)) as server:
        rule = rule_of(server, tmp_path, system="Be strict.", fields={"seed": 3, "top_k": 1})
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
    with scoring_server(judged(rated_by_length)) as server:
        rule = rule_of(server, tmp_path, concurrency=1)
        one = [{"role": "user", "content": "Hi"}]
        rule(["<s>Hi", "<s>Yo"], ["a", "b"], prompt_messages=[one, [*one, {"role": "assistant", "content": "Ho"}]])
        texts = [body["messages"][0]["content"] for body in server.asked]
        assert "[The question]\nHi\n[The end" in texts[0]
        assert "[The question]\nuser: Hi\n\nassistant: Ho\n[The end" in texts[1]


def test_swapped_orders_give_symmetric_scores(tmp_path):
    """Also of a judge that prefers what stands first: of equal lengths it takes A, which makes a draw."""
    pairs = [("p", "long one", "short"), ("p", "short", "long one"), ("p", "abcd", "efgh"), ("p", "same", "same")]
    with scoring_server(judged(longer_wins)) as server:
        rule = rule_of(server, tmp_path, form="pairwise")
        assert rule.shares(pairs, [None] * 4) == [1.0, 0.0, 0.5, 0.5]
        assert len(server.asked) == 4  # two orders of two pairs: a swapped pair is the same, an equal one is not asked
    with scoring_server(judged(lambda question: "[[A]]")) as server:
        rule = rule_of(server, tmp_path, form="pairwise")
        assert rule.shares(pairs, [None] * 4) == [0.5] * 4


def test_a_group_gets_shares_of_wins(tmp_path):
    with scoring_server(judged(longer_wins)) as server:
        rule = rule_of(server, tmp_path, form="pairwise")
        prompts, responses = ["p"] * 3 + ["q"] * 2 + ["r"], ["a", "aaa", "aa", "b", "bb", "c"]
        assert rule(prompts, responses) == [0.0, 1.0, 0.5, 0.0, 1.0, None]  # the last has nobody beside it
        assert len(server.asked) == 2 * (3 + 1)
        assert sum(rule(["p"] * 3, responses[:3])) == 1.5
        few = rule_of(server, tmp_path, form="pairwise", opponents=1)
        assert few(["s"] * 4, ["a", "aa", "aaa", "aaaa"]) == [0.0, 0.5, 0.5, 1.0]


def test_against_the_reference(tmp_path):
    with scoring_server(judged(longer_wins)) as server:
        rule = rule_of(server, tmp_path, form="pairwise", against="ground_truth")
        assert rule(["p", "p"], ["aaa", "a"], ground_truth=["bb", "bb"]) == [1.0, 0.0]
        with pytest.raises(ThreestepError, match="shows the judge each row's ground_truth, and the row with the"):
            rule(["p"], ["a"], ground_truth=[None])


def test_each_pair_of_a_group_once():
    assert pairs_of([4, 5, 6], None) == [(4, 5), (5, 6), (4, 6)]
    assert sorted(pairs_of(range(4), None)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert sorted(pairs_of(range(5), 1)) == [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    assert pairs_of([3], None) == [] and pairs_of([3, 4], 5) == [(3, 4)]


def test_failures_change_nothing_but_time(tmp_path):
    responses = ["a" * number for number in range(30)]
    with scoring_server(judged(rated_by_length), fails=mostly_failing) as server:
        found = rule_of(server, tmp_path)(["p"] * 30, responses)
        assert found == [1.0 + number % 10 for number in range(30)]
        assert len(server.answered) == 30 and len(server.asked) > 38


@pytest.mark.parametrize("reply", ["I cannot say.", "[[99]]", ""])
def test_a_reply_without_a_verdict_is_no_score(tmp_path, reply):
    with scoring_server(judged(lambda question: reply)) as server:
        rule = rule_of(server, tmp_path, retries=2)
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"has no verdict on prompt 'p'.*: the reply has no verdict.*after 3"):
            rule(["p"], ["a"])
        assert len(server.asked) == 3
    [line] = (tmp_path / "run/verdicts/judge.rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] == 36 and "value" not in json.loads(line)


def test_an_endpoint_that_never_answers_ends_within_a_bound(tmp_path):
    with scoring_server(judged(rated_by_length), silent=True) as server:
        rule = rule_of(server, tmp_path, retries=1, seconds=0.3)
        began = time.monotonic()
        with pytest.raises(ThreestepError, match="no answer"):
            rule(["p"] * 3, ["a", "b", "c"])
        assert time.monotonic() - began < 5


def test_a_client_that_notices_first_says_the_same(tmp_path, monkeypatch):
    """Who waits for the answer is late, as on a busy machine."""
    within = service._within
    monkeypatch.setattr(service, "_within", lambda seconds, *others: within(30 * seconds, *others))
    with scoring_server(judged(rated_by_length), silent=True) as server:
        rule = rule_of(server, tmp_path, retries=0, seconds=0.2)
        with pytest.raises(ThreestepError, match=r"no answer within 0.2 seconds$"):
            rule(["p"] * 3, ["a", "b", "c"])


def test_a_bound_on_tokens_wants_them_counted(tmp_path):
    with scoring_server(judged(rated_by_length, tokens=None)) as server:
        assert rule_of(server, tmp_path)(["p"], ["a"]) == [2.0]
        with pytest.raises(ThreestepError, match="most_tokens expects the field usage in replies"):
            rule_of(server, tmp_path, most_tokens=100)(["p"], ["a"])
        assert len(server.asked) == 2


def test_the_key_is_the_files_and_the_environments_others_are_not_sent(tmp_path, monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "of-openai-alone")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Other: of-openai-alone")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with scoring_server(judged(rated_by_length)) as server:
        rule_of(server, tmp_path)(["p"], ["a"])
        rule_of(server, tmp_path, key_variable="JUDGE_KEY")(["p"], ["a"])
        assert [headers.get("authorization") for headers in server.headers] == [None, f"Bearer {KEY}"]
        assert "of-openai-alone" not in json.dumps(server.headers)
    with scoring_server(judged(rated_by_length), fails=lambda number: 401) as server:
        rule = rule_of(server, tmp_path, key_variable="JUDGE_KEY")
        rule.open(RunPlace(tmp_path / "run"))
        with pytest.raises(ThreestepError, match=r"the server answered 401: .*Bearer \*\*\*") as found:
            rule(["p"], ["a"])
        assert len(server.asked) == 1 and KEY not in str(found.value)
    with scoring_server(judged(lambda question: f"I was asked with {KEY}. [[3]]")) as server:
        rule = rule_of(server, tmp_path, key_variable="JUDGE_KEY")
        rule.open(RunPlace(tmp_path / "run"))
        assert rule(["p"], ["a"]) == [3.0]
    log = (tmp_path / "run/verdicts/judge.rank0.jsonl").read_text()
    assert KEY not in log and "I was asked with ***." in log


def test_mistakes_of_the_file_are_sentences(tmp_path):
    given = {"model": "tiny", "base_url": "http://h/v1", "rubric": "x"}
    for changes, sentence in (
        ({"fields": {"stream": True, "n": 2}}, "fields has stream, n, which the judge sets itself"),
        ({"max_tokens": 0}, "max_tokens expects 1 or more"),
        ({"rubrik": "y"}, "unknown setting 'rubrik'; did you mean 'rubric'"),
        ({"scale": "1-5"}, "scale expects a list, got '1-5'"),
        ({"base_url": "localhost"}, "expects an address such as"),
    ):
        path = tmp_path / "judge.yaml"
        path.write_text(json.dumps({**given, **changes}))
        with pytest.raises(ThreestepError, match="--reward judge:.*") as found:
            judge_reward(f"judge:{path}", "judge")
        assert sentence in str(found.value)
    path.write_text(json.dumps({"base_url": "http://h/v1"}))
    with pytest.raises(ThreestepError, match=r"(?s)expects model, and has none.*expects rubric, and has none"):
        judge_reward(f"judge:{path}", "judge")
    assert judge_name("judge:rubrics/helpful.yaml") == "helpful"
