"""Environments that drive the model: their requests become turns, and what is rewritten is refused."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from threestep.plugins.environments.calling.calls import Caller
from threestep.plugins.environments.driven.driven import Driven, DrivenEnvironment, added_messages, as_message
from threestep.plugins.environments.driven.endpoint import ENDPOINT, asked_of, chunks_of, completion_of
from threestep.plugins.environments.episodes import Episode, EpisodeSettings
from threestep.plugins.environments.interface import AssistantMessage, Call

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")]

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def post(base_url, messages, **more):
    """Ask an endpoint; the parsed response, or the status that refuses."""
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code
    return text if more.get("stream") else json.loads(text)["choices"][0]["message"]


class Agent(DrivenEnvironment):
    """Asks twice: answers calls, and pays for what was said last."""

    forgets = False

    async def run(self, row, base_url):
        messages = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
        message = await asyncio.to_thread(post, base_url, messages, tools=TOOLS)
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "37"}
            for call in message.get("tool_calls", ())
        ]
        messages = ([] if self.forgets else messages) + [message, *(answers or [{"role": "user", "content": "and?"}])]
        message = await asyncio.to_thread(post, base_url, messages, tools=TOOLS)
        return Driven(float(message["content"] == "37"), {"right": 1.0})


@pytest.fixture
def episode():
    """An episode of an environment, as rollouts run it, and the failures that it warned of."""
    caller, warned, made = Caller(), [], []

    def begun(make):
        settings = EpisodeSettings(name="agent", make=make, seconds=30, characters=1000, warn=warned.append)
        made.append(Episode(settings, {"prompt": "Code?"}, 1, caller))
        return made[-1], warned

    yield begun
    for each in made:
        each.close()
    caller.close()


def test_requests_become_turns(episode):
    talk, warned = episode(Agent)
    opening = talk.reset().result()
    assert opening.messages == [{"role": "user", "content": "Code?"}]
    assert opening.tools == TOOLS
    reply = talk.step(AssistantMessage("...", "I look", calls=(Call("look", {"key": "a"}),))).result()
    assert reply.messages == [{"role": "tool", "content": "37", "name": "look", "tool_call_id": "call00001"}]
    assert not reply.done
    last = talk.step(AssistantMessage("37", "37")).result()
    assert (last.messages, last.reward, last.done) == ([], 1.0, True)
    assert talk.figures["calls"] == 1 and talk.figures["right"] == 1
    assert warned == []


def test_a_history_that_is_rewritten_ends_the_conversation(episode):
    talk, warned = episode(type("Forgetful", (Agent,), {"forgets": True}))
    talk.reset().result()
    reply = talk.step(AssistantMessage("a", "a")).result()
    assert reply.done and reply.reward == 0
    assert "the next request has another message 1 (user) than the conversation so far" in warned[0]


def test_what_run_raises_is_counted(episode):
    class Broken(Agent):
        async def run(self, row, base_url):
            await asyncio.to_thread(post, base_url, [{"role": "user", "content": "a"}])
            raise OSError("no judge")

    talk, warned = episode(Broken)
    talk.reset().result()
    assert talk.step(AssistantMessage("a", "a")).result().done
    assert "raised OSError: no judge" in warned[0]


def test_a_conversation_that_is_cut_is_turned_away(episode):
    refused = []

    class Waits(Agent):
        async def run(self, row, base_url):
            refused.append(base_url)
            refused.append(await asyncio.to_thread(post, base_url, [{"role": "user", "content": "a"}]))

    talk, _ = episode(Waits)
    talk.reset().result()
    talk.close()
    for _ in range(100):
        if post(refused[0], [{"role": "user", "content": "b"}]) == 404:
            break
    assert post(refused[0], [{"role": "user", "content": "b"}]) == 404


def test_the_endpoint_refuses_what_it_does_not_do():
    loop = asyncio.new_event_loop()
    line = ENDPOINT.open(loop)
    try:
        assert post(line.base_url, []) == 400
        assert post(line.base_url, [{"role": "user", "content": "a"}], n=2) == 400
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{line.base_url}/models", b"{}", timeout=30)
        assert post(line.base_url[:-8] + "another/v1", [{"role": "user", "content": "a"}]) == 404
    finally:
        ENDPOINT.close(line)
        loop.close()


def test_an_answer_has_openais_form():
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = completion_of(message)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"] == message
    deltas = [chunk["choices"][0] for chunk in chunks_of(message)[:2]]
    assert deltas[0]["delta"]["tool_calls"] == [{"index": 0, **call}]
    assert deltas[1]["finish_reason"] == "tool_calls"
    asked, streams = asked_of({"messages": [message], "stream": True})
    assert streams and asked.tools is None


def test_messages_behind_those_that_are_known():
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert added_messages(before, [*before, {"role": "user", "content": "c", "extra": 1}]) == [
        {"role": "user", "content": "c"}
    ]
    for now in (before[:1], [before[0], {"role": "assistant", "content": "other"}]):
        with pytest.raises(ValueError, match="has another message 2"):
            added_messages(before, now)
    with pytest.raises(ValueError, match="got a part of type image_url"):
        as_message({"role": "user", "content": [{"type": "image_url"}]})
