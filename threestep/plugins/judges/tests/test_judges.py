"""Judges and reward servers that nobody asks: addresses and names, rubrics, the log of verdicts, its replay,
budgets."""

from __future__ import annotations

import json
import random
import threading

import pytest

from threestep.plugins.judges.rubric import PAIRWISE, RubricSettings
from threestep.plugins.judges.service import AskedService
from threestep.plugins.judges.verdicts import AskedQuestion, Verdict, folder_of_replay
from threestep.plugins.serving.asking.failures import FailedRequest
from threestep.plugins.serving.asking.settings import AskSettings
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.table import RunPlace, kind_of, reward_name, split_weight
from training.utils.rewards.weighted import check_comparisons, comparing, named_rewards, reads_ids, reads_messages


def test_entries_that_are_addresses_and_their_weights():
    found = {
        entry: (reward_name(entry), split_weight(entry.strip())[1])
        for entry in ("judge:dir/kind.yaml:0", "http:http://h:80", "https://h/x:-2")
    }
    assert found == {
        "judge:dir/kind.yaml:0": ("kind", 0.0), "http:http://h:80": ("h_80", 1.0), "https://h/x:-2": ("h", -2.0),
    }  # fmt: skip
    assert kind_of("judge:a.yaml") and not kind_of("judge.py:a")
    assert kind_of("http:server.yaml") and not kind_of("httpd.py:score")


def test_addresses_of_servers_and_judges_and_their_weights(tmp_path, monkeypatch):
    """A port is no weight."""
    monkeypatch.delenv("THREESTEP_API_KEY", raising=False)
    (tmp_path / "kind.yaml").write_text("model: m\nbase_url: http://h/v1\nrubric: Kind.\n")
    for given, name, weight in (
        ("http:http://127.0.0.1:8001", "127.0.0.1_8001", 1.0),
        ("http:http://127.0.0.1:8001:2", "127.0.0.1_8001", 2.0),
        ("http://h:80/v1/scores", "h_80", 1.0),
        ("http:https://h/v1/scores:0.5", "h", 0.5),
        ("http:http://[::1]:8001", "___1__8001", 1.0),
        (f"judge:{tmp_path / 'kind.yaml'}", "kind", 1.0),
        (f"judge:{tmp_path / 'kind.yaml'}:-3", "kind", -3.0),
    ):
        mistakes = Mistakes()
        [reward] = named_rewards(ScoringArguments(reward=given), mistakes)
        mistakes.raise_if_any()
        assert (reward.name, reward.weight) == (name, weight) and reward_name(given) == name
        assert reads_messages([reward]) and reads_ids([reward]) == given.startswith("http")


def test_a_judge_that_compares_wants_several_responses(tmp_path):
    (tmp_path / "duel.yaml").write_text("model: m\nbase_url: http://h/v1\nrubric: Kind.\nform: pairwise\n")
    mistakes = Mistakes()
    flags = ScoringArguments(reward=f"judge:{tmp_path / 'duel.yaml'},length", reward_length_characters=3)
    found = named_rewards(flags, mistakes)
    check_comparisons(found, {"--val_samples 1": 1, "--num_samples_per_prompt 2": 2}, mistakes)
    assert len(comparing(found)) == 1
    with pytest.raises(ThreestepError, match="--reward duel compares the responses .*, but --val_samples 1 allows one"):
        mistakes.raise_if_any()


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("[[7]]", 7.0),
        ("Well.\n[[ 7.5 ]]", 7.5),
        ("Its answer says [[10]], which is wrong.\n[[2]]", 2.0),
        ("<think>[[3]]</think> Rating: [[4]].", 4.0),
        ("7", None),
        ("[[7/10]]", None),
        ("[[11]]", None),
        ("[[nan]]", None),
        ("[[1e1]]", None),
        ("[[8]] on reflection [[none]]", None),
    ],
)
def test_a_rating_is_the_last_verdict_within_the_scale(reply, rating):
    assert RubricSettings("Short.").reads(reply) == rating


def test_a_comparison_is_one_of_three_letters():
    reads = RubricSettings("Short.", PAIRWISE).reads
    assert [reads(f"So: [[{word}]]") for word in ("A", "B", "C", "a", "D", "A>B", "")] == [
        1.0, 0.0, 0.5, 1.0, None, None, None,
    ]  # fmt: skip


def test_what_is_put_in_is_not_read_again():
    text = RubricSettings("Be {prompt} {kind}.").text(prompt="{response}", response="{rubric} {{}", ground_truth="None")
    assert "Be {prompt} {kind}." in text and "[The question]\n{response}\n" in text
    assert "[The answer]\n{rubric} {{}\n[The end of the answer]" in text and "reference" not in text
    text = RubricSettings("x", with_reference=True, scale=[0, 1.5]).text(prompt="p", response="r", ground_truth="5")
    assert "[A reference answer]\n5\n" in text and "[[0]] is the worst, [[1.5]] the best" in text
    text = RubricSettings("x", PAIRWISE).text(prompt="p", first="one", second="two", ground_truth="5")
    assert "[Answer A]\none\n" in text and "[Answer B]\ntwo\n" in text and "two assistants' answers" in text
    own = RubricSettings("x", question="{rubric}: {prompt}|{response}|{ground_truth}")
    assert own.text(prompt="p", response="r", ground_truth="5") == "x: p|r|5" and own.reads_reference


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"form": "pair"}, "form expects one of pointwise, pairwise, got 'pair'; did you mean 'pairwise'"),
        ({"rubric": " "}, "rubric is empty; write the criteria there"),
        ({"scale": [1]}, r"scale expects \[LOWEST, HIGHEST\], got \[1\]"),
        ({"scale": [1, "5"]}, r"scale expects \[LOWEST, HIGHEST\]"),
        ({"against": "ground_truth"}, "against and opponents need form: pairwise, but form is pointwise"),
        ({"form": PAIRWISE, "scale": [1, 5]}, "scale needs form: pointwise"),
        ({"form": PAIRWISE, "opponents": 0}, "opponents must be 1 or more"),
        (
            {"form": PAIRWISE, "opponents": 1, "against": "ground_truth"},
            "opponents must be 1 or more and needs against: gr",
        ),
        ({"question": "{prompt} {answer}"}, "question has the unknown field {answer}; it can use {prompt}, "),
        ({"question": "{prompt}"}, "question must contain {response}"),
        ({"form": PAIRWISE, "question": "{prompt}{first}"}, "question must contain {second}"),
    ],
)
def test_mistakes_are_sentences(changes, sentence):
    mistakes = Mistakes()
    RubricSettings(**{"rubric": "Short.", **changes}).check("judge.yaml", mistakes)
    with pytest.raises(ThreestepError, match=f"judge.yaml: {sentence}"):
        mistakes.raise_if_any()


QUICK = AskSettings(pause=0.001)


def question(text: str) -> AskedQuestion:
    return AskedQuestion({"text": text}, text, f"'{text}'")


def questions(*texts: str) -> list[AskedQuestion]:
    return [question(text) for text in texts]


class Judge:
    """Draws a new number each time, as a judge that samples does."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self.asked, self._lock = random.Random(seed), [], threading.Lock()  # noqa: S311 (no secret)

    def __call__(self, asked):
        with self._lock:
            self.asked += [each.content for each in asked]
            return [Verdict(self._random.gauss(0, 1), f"of {each.content}", 10) for each in asked]


def lines(folder, rank: int = 0, name: str = "judge") -> list[dict]:
    return [json.loads(line) for line in (folder / "verdicts" / f"{name}.rank{rank}.jsonl").read_text().splitlines()]


def opened(place: RunPlace, settings: AskSettings = QUICK) -> AskedService:
    service = AskedService("judge", settings)
    service.open(place)
    return service


def test_every_verdict_is_logged_and_given_again_to_the_bit(tmp_path):
    judge = Judge()
    first = opened(RunPlace(tmp_path)).values(questions("a", "b", "a"), judge)
    assert first[0] == first[2] != first[1] and sorted(judge.asked) == ["a", "b"]
    assert sorted(line["asked"]["text"] for line in lines(tmp_path)) == ["a", "b"]
    [of_a] = [line for line in lines(tmp_path) if line["asked"]["text"] == "a"]
    assert (of_a["value"], of_a["reply"], of_a["tokens"], of_a["requests"]) == (first[0], "of a", 10, 1)
    # A run that resumes asks what is new.
    later = opened(RunPlace(tmp_path)).values(questions("b", "c"), judge)
    assert later[0] == first[1] and judge.asked[2:] == ["c"] and len(lines(tmp_path)) == 3


def test_a_replay_asks_nobody_and_logs_what_it_gives(tmp_path):
    first = opened(RunPlace(tmp_path / "one")).values(questions("a", "b"), Judge())
    replay = opened(RunPlace(tmp_path / "two", replay=folder_of_replay(str(tmp_path / "one"))))
    assert replay.replays and replay.values(questions("b", "a", "b"), None) == [first[1], first[0], first[1]]
    again = opened(RunPlace(replay=folder_of_replay(str(tmp_path / "two" / "verdicts"))))
    assert again.values(questions("a", "b"), None) == first and len(lines(tmp_path / "two")) == 2
    with pytest.raises(ThreestepError, match=r"--reward_replay .* no verdict from the reward 'judge' for 'c'; this"):
        replay.values(questions("a", "c"), None)
    with pytest.raises(ThreestepError, match="has no verdicts from the reward 'judge' .judge.rank0.jsonl"):
        opened(RunPlace(replay=tmp_path))
    with pytest.raises(ThreestepError, match="--reward_replay expects the folder of a run that used"):
        folder_of_replay(str(tmp_path / "none"))


def test_ranks_have_a_log_each_and_their_own_verdict_first(tmp_path):
    values = [opened(RunPlace(tmp_path, rank, 2)).values(questions("a", f"r{rank}"), Judge(rank)) for rank in (0, 1)]
    assert values[1][0] == values[0][0]  # opened later, rank 1 finds what rank 0 has asked
    own = {"value": 7.0, "key": question("a").key}
    (tmp_path / "verdicts" / "judge.rank1.jsonl").open("a").write(json.dumps(own) + "\n")
    replay = tmp_path / "verdicts"
    assert opened(RunPlace(None, 0, 2, replay=replay)).values(questions("a", "r1"), None) == [
        values[0][0],
        values[1][1],
    ]
    assert opened(RunPlace(None, 1, 2, replay=replay)).values(questions("a", "r0"), None) == [7.0, values[0][1]]


def test_a_line_that_arrived_in_part_is_asked_again(tmp_path):
    judge = Judge()
    first = opened(RunPlace(tmp_path), AskSettings(concurrency=1)).values(questions("a", "b"), judge)
    path = tmp_path / "verdicts" / "judge.rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    later = opened(RunPlace(tmp_path)).values(questions("a", "b"), judge)
    assert later[0] == first[0] and judge.asked == ["a", "b", "b"] and len(lines(tmp_path)) == 2


def test_a_failure_is_no_verdict(tmp_path):
    def failing(asked):
        if asked[0].content == "b":
            raise FailedRequest("nothing to read", tokens=3)
        return [Verdict(1.0)]

    settings = AskSettings(pause=0.001, retries=2, concurrency=1)
    with pytest.raises(ThreestepError, match=r"the reward 'judge' has no verdict on 'b': nothing to read \(after 3"):
        opened(RunPlace(tmp_path), settings).values(questions("a", "b", "c"), failing)
    a, b = lines(tmp_path)
    assert a["value"] == 1.0 and "value" not in b and b["failed"] == "nothing to read"
    assert (b["requests"], b["tokens"]) == (3, 9)  # and c was not asked
    assert opened(RunPlace(tmp_path)).values(questions("b", "c"), lambda asked: [Verdict(2.0)]) == [2.0, 2.0]

    def broken(asked):
        raise KeyError("choices")

    with pytest.raises(ThreestepError, match="KeyError: 'choices'"):
        opened(RunPlace(), settings).values(questions("a"), broken)


def test_the_budget_of_requests_is_exact_shared_and_kept_over_a_resume(tmp_path):
    settings = AskSettings(pause=0.001, concurrency=3, most_requests=7)
    asked = []
    for rank in (0, 1):
        judge = Judge()
        with pytest.raises(ThreestepError, match="the budget of 7 requests is used up .most_requests of 'judge'"):
            opened(RunPlace(tmp_path / str(rank), rank, 2), settings).values(questions(*"abcdefgh"), judge)
        asked.append(len(judge.asked))
    assert asked == [4, 3]
    judge = Judge()
    opened(RunPlace(tmp_path), AskSettings(most_requests=2)).values(questions("a"), judge)
    again = opened(RunPlace(tmp_path), AskSettings(most_requests=2))
    again.values(questions("a", "b"), judge)
    with pytest.raises(ThreestepError, match="the budget of 2 requests is used up"):
        again.values(questions("c"), judge)
    assert judge.asked == ["a", "b"]


def test_the_budget_of_tokens_ends_the_asking():
    judge, settings = Judge(), AskSettings(concurrency=1, most_tokens=25)
    with pytest.raises(ThreestepError, match="the budget of 25 tokens is used up .most_tokens"):
        opened(RunPlace(), settings).values(questions(*"abcdef"), judge)
    assert len(judge.asked) == 3  # 10 tokens each: the third one crosses the bound
