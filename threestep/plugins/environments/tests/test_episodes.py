"""A conversation with a user's environment: nothing blocks, what fails ends it or stops the run in a sentence."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from threestep.plugins.environments.episodes import Episode, EpisodeSettings
from threestep.plugins.environments.interface import Call, EnvironmentReply, Opening
from threestep.plugins.environments.tests.conftest import said
from training.utils.base.errors import ThreestepError

USER = {"role": "user", "content": "go"}
HELLO = said("hello")
NEVER = threading.Event()


class Counting:
    """Ends at its third step."""

    closed = 0

    def reset(self, row, seed):
        self.steps, self.seed = 0, seed
        return Opening([{"role": "user", "content": f"{row['a']} {seed}"}])

    def step(self, message):
        self.steps += 1
        return [USER], 0.5, self.steps == 3, {"steps": 1}

    def close(self):
        Counting.closed += 1


def returning(opening=None, reply=None):
    """A class whose methods return these, or raise them, or call them."""

    def give(value):
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    class Returning:
        def reset(self, row):
            return give(([USER],) if opening is None else opening)

        def step(self, message):
            return give(reply)

        def close(self):
            raise OSError("already gone")

    return Returning


def episode_of(caller, make, warn=lambda sentence: None, seconds: float | None = 5.0) -> Episode:
    return Episode(EpisodeSettings("Own", make, seconds, 100, warn), {"a": "x"}, 7, caller)


def test_steps_add_up_and_tuples_will_do(caller):
    class Plain(Counting):
        def step(self, message):
            return tuple(super().step(message))

    class Async(Counting):
        async def reset(self, row, seed):
            await asyncio.sleep(0.001)
            return super().reset(row, seed)

        async def step(self, message):
            await asyncio.sleep(0.001)
            return EnvironmentReply(*super().step(message))

    for make in (Plain, Async):
        before = Counting.closed
        episode = episode_of(caller, make)
        assert episode.reset().result(5) == Opening([{"role": "user", "content": "x 7"}])
        replies = [episode.step(HELLO).result(5) for _ in range(3)]
        assert [reply.done for reply in replies] == [False, False, True]
        assert episode.rewards == [0.5] * 3 and episode.figures["steps"] == 3
        episode.close()
        deadline = time.monotonic() + 5
        while Counting.closed == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert Counting.closed == before + 1


def test_what_an_environment_holds_it_may_change(caller):
    """The message that it is handed, and the messages and tools that it returned: the rollout reads its own again."""
    message, tools = {"role": "user", "content": "go", "notes": ["a"]}, [{"name": "look"}]

    class Changing:
        def reset(self, row):
            return [message], tools

        def step(self, said):
            said.calls[0].arguments["numbers"].sort()
            message["notes"].append("b")
            message["content"] += "!"
            tools.append({})
            return [message], 0.0, False

        def close(self): ...

    episode = episode_of(caller, Changing)
    opening = episode.reset().result()
    asked = said("", Call("sort", {"numbers": [2, 1]}))
    replies = [episode.step(asked).result() for _ in range(2)]
    assert opening == ([{"role": "user", "content": "go", "notes": ["a"]}], [{"name": "look"}])
    assert asked.calls[0].arguments == {"numbers": [2, 1]}
    assert [reply.messages[0]["notes"] for reply in replies] == [["a", "b"], ["a", "b", "b"]]


def test_conversations_do_not_wait_for_each_other(caller):
    together = threading.Barrier(8)

    def meet():
        together.wait(10)
        return [], 1.0, True

    episodes = [
        episode_of(caller, returning(lambda: ([USER] * (together.wait(10) >= 0),), meet), seconds=30) for _ in range(8)
    ]
    openings = [episode.reset() for episode in episodes]
    assert [opening.result(30).messages for opening in openings] == [[USER]] * 8
    steps = [episode.step(HELLO) for episode in episodes]
    assert [step.result(30).reward for step in steps] == [1.0] * 8
    for episode in episodes:
        episode.close()  # it raises, and nobody waits


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (ValueError("x"), "step raised ValueError: x ("),
        (SystemExit(2), "step raised SystemExit: 2 ("),
        (lambda: NEVER.wait(), "step did not return within --environment_seconds 0.2"),
        (None, "step must return (messages, reward, done), got NoneType"),
        (([], 0.0), "step must return messages unless the conversation is done, got none"),
        (([USER], float("nan")), "step must return a reward that is finite in float32, got nan"),
        (([USER], 10**400), "step must return a reward that is finite in float32, got 1000"),
        (([USER], 0.0, 1), "step must return True or False as done, got 1"),
        (([USER], 0.0, False, {"a": "b"}), "step must return figures as finite numbers by name, got"),
        (([USER], 0.0, False, {None: 1.0, "a": 1.0}), "step must return figures as finite numbers by name"),
        (("text", 0.0), "step must return a list of messages, got str"),
        (
            ([{"role": "assistant", "content": ""}],),
            "step must return messages with a role among system, developer, user",
        ),
        (([{"role": "tool", "content": None}],), "step must return messages whose content is text, got"),
        (
            ([{"role": "tool", "content": "a", "of": {1}}],),
            "step must return messages that JSON can hold, got Object of",
        ),
    ],
)
def test_a_step_that_fails_ends_the_conversation_counted(caller, reply, problem):
    warned: list[str] = []
    episode = episode_of(caller, returning(reply=reply), warned.append, 0.2)
    episode.reset().result(5)
    found = episode.step(HELLO).result(5)
    assert (found.messages, found.reward, found.done) == ([], 0.0, True)
    assert episode.figures["environment_failures"] == 1 and episode.rewards == [0.0]
    (sentence,) = warned
    assert sentence.startswith(f"environment 'Own': {problem}") and sentence.endswith("the conversation ends there")


@pytest.mark.parametrize(
    ("opening", "problem"),
    [
        (ValueError("x"), "reset raised ValueError: x"),
        (lambda: NEVER.wait(), "reset did not return within --environment_seconds 0.2"),
        ("hello", r"reset must return \(messages, tools\), got str"),
        (([],), "reset must return messages that end with one for the model"),
        (
            ([USER, {"role": "assistant", "content": "a"}],),
            "reset must return messages that end with one for the model",
        ),
        (([USER], ["f"]), r"reset must return tools as a list of JSON schemas, got \['f'\]"),
    ],
)
def test_an_environment_that_cannot_begin_stops_the_run(caller, opening, problem):
    def make():
        raise OSError("no table")

    for each, sentence in ((returning(opening), problem), (make, "reset raised OSError: no table")):
        episode = episode_of(caller, each, seconds=0.2)
        with pytest.raises(ThreestepError, match=f"environment 'Own': {sentence}.*; fix it"):
            episode.reset().result(5)
        episode.close()


def test_messages_are_bounded_and_rewards_stay_in_float32(caller):
    long = {"role": "user", "content": "a" * 1_000_000}
    episode = episode_of(caller, returning(reply=([long, {"role": "tool", "content": "\udcff"}],)))
    episode.reset().result(5)
    first, second = episode.step(HELLO).result(5).messages
    assert len(first["content"]) == 100 and second["content"] == "?"
    assert (episode.figures["cut_answers"], episode.figures["mended_answers"]) == (1, 1)
    assert len(long["content"]) == 1_000_000  # the environment's own message
    warned = []
    episode = episode_of(caller, returning(reply=([USER], 3e38)), warn=warned.append)
    episode.reset().result(5)
    assert not episode.step(HELLO).result(5).done
    assert episode.step(HELLO).result(5).done
    assert episode.rewards == [3e38, 0.0] and episode.figures["environment_failures"] == 1
    assert (
        "step must return rewards whose sum is finite in float32, got another 3e+38; the conversation ends" in warned[0]
    )
