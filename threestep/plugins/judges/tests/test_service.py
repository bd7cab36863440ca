"""The log of verdicts, its replay and the budget, by a function in the place of a service."""

from __future__ import annotations

import json
import random
import threading

import pytest

from threestep.plugins.judges.service import AskedService
from threestep.plugins.judges.verdicts import AskedQuestion, Verdict, folder_of_replay
from threestep.plugins.serving.asking.failures import FailedRequest
from threestep.plugins.serving.asking.settings import AskSettings
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import RunPlace

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
    with pytest.raises(ThreestepError, match=r"--reward_replay .* has no verdict of the reward 'judge' for 'c': this"):
        replay.values(questions("a", "c"), None)
    with pytest.raises(ThreestepError, match="holds no verdicts of the reward 'judge': expected judge.rank0.jsonl"):
        opened(RunPlace(replay=tmp_path))
    with pytest.raises(ThreestepError, match="--reward_replay expects the folder of a run that asked"):
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
        with pytest.raises(ThreestepError, match="the budget of 7 requests is spent .most_requests of 'judge'"):
            opened(RunPlace(tmp_path / str(rank), rank, 2), settings).values(questions(*"abcdefgh"), judge)
        asked.append(len(judge.asked))
    assert asked == [4, 3]
    judge = Judge()
    opened(RunPlace(tmp_path), AskSettings(most_requests=2)).values(questions("a"), judge)
    again = opened(RunPlace(tmp_path), AskSettings(most_requests=2))
    again.values(questions("a", "b"), judge)
    with pytest.raises(ThreestepError, match="the budget of 2 requests is spent"):
        again.values(questions("c"), judge)
    assert judge.asked == ["a", "b"]


def test_the_budget_of_tokens_ends_the_asking():
    judge, settings = Judge(), AskSettings(concurrency=1, most_tokens=25)
    with pytest.raises(ThreestepError, match="the budget of 25 tokens is spent .most_tokens"):
        opened(RunPlace(), settings).values(questions(*"abcdef"), judge)
    assert len(judge.asked) == 3  # 10 tokens each: the third one crosses the bound
