"""Environments that drive the model, strangers at their endpoint, and those of the package verifiers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.support.data_flags import data_flags
from tests.support.hostile import attack
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.driven import endpoint
from threestep.plugins.environments.driven.driven import Driven, DrivenEnvironment, added_messages, as_message
from threestep.plugins.environments.driven.endpoint import ENDPOINT, asked_of, chunks_of, completion_of
from threestep.plugins.environments.driven.verifiers_tasks import check_verifiers
from threestep.plugins.environments.episodes import Episode, EpisodeSettings
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.loading import load_environments
from threestep.plugins.environments.rows import rows_of
from threestep.plugins.environments.tests.conftest import said
from threestep.plugins.serving import threaded
from training.utils.base.errors import Mistakes, ThreestepError

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
def episode(caller):
    """An episode of an environment, as rollouts run it, and the failures that it warned of."""
    warned, made = [], []

    def begun(make):
        settings = EpisodeSettings(name="agent", make=make, seconds=30, characters=1000, warn=warned.append)
        made.append(Episode(settings, {"prompt": "Code?"}, 1, caller))
        return made[-1], warned

    yield begun
    for each in made:
        each.close()


def test_requests_become_turns(episode):
    talk, warned = episode(Agent)
    opening = talk.reset().result()
    assert opening.messages == [{"role": "user", "content": "Code?"}]
    assert opening.tools == TOOLS
    reply = talk.step(said("I look", Call("look", {"key": "a"}))).result()
    assert reply.messages == [{"role": "tool", "content": "37", "name": "look", "tool_call_id": "call00001"}]
    assert not reply.done
    last = talk.step(said("37")).result()
    assert (last.messages, last.reward, last.done) == ([], 1.0, True)
    assert talk.figures["calls"] == 1 and talk.figures["right"] == 1
    assert warned == []


def test_a_history_that_is_rewritten_ends_the_conversation(episode):
    talk, warned = episode(type("Forgetful", (Agent,), {"forgets": True}))
    talk.reset().result()
    reply = talk.step(said("a")).result()
    assert reply.done and reply.reward == 0
    assert "message 1 (user) of the next request differs from the conversation so far" in warned[0]


def test_what_run_raises_is_counted(episode):
    class Broken(Agent):
        async def run(self, row, base_url):
            await asyncio.to_thread(post, base_url, [{"role": "user", "content": "a"}])
            raise OSError("no judge")

    talk, warned = episode(Broken)
    talk.reset().result()
    assert talk.step(said("a")).result().done
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
        with pytest.raises(ValueError, match="message 2"):
            added_messages(before, now)
    with pytest.raises(ValueError, match="got a part of type image_url"):
        as_message({"role": "user", "content": [{"type": "image_url"}]})


@pytest.fixture
def base_url():
    """The address of a conversation whose requests are answered at once."""
    loop = asyncio.new_event_loop()
    line = ENDPOINT.open(loop)

    async def answer() -> None:
        while True:
            (await line.next()).answer.set_result({"role": "assistant", "content": "37"})

    running = loop.create_task(answer())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield line.base_url
    ENDPOINT.close(line)
    loop.call_soon_threadsafe(running.cancel)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def status_of(base_url: str, body: bytes) -> int:
    try:
        with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


ASKED = json.dumps({"model": "any", "messages": [{"role": "user", "content": "a"}]}).encode()


def test_strangers_hold_little_and_their_bodies_are_not_read(base_url, monkeypatch):
    port = urlsplit(base_url).port
    found = attack(port, "/" + "k" * 32 + "/v1/chat/completions", lambda: status_of(base_url, ASKED), 400, 300)
    found.check(threaded.MOST_STRANGERS + 12)
    monkeypatch.setattr(endpoint._LineHandler, "body", lambda self: pytest.fail("it was read"))
    assert status_of(base_url.replace("/v1", "x/v1"), ASKED) == 404


def test_bodies_that_are_none_are_sentences(base_url, capsys):
    for body in (b"[" * 100_000, b'{"messages":[' * 100_000, b'{"messages": %s}' % (b"9" * 5000), b"[]", b"\xff"):
        assert status_of(base_url, body) == 400
    assert status_of(base_url, ASKED) == 200 and capsys.readouterr().err == ""


IS_THERE = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not IS_THERE, reason="needs the package verifiers")

WORDS = """
import verifiers.v1 as vf

__all__ = ["Words"]

class WordData(vf.TaskData):
    answer: str

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        if trace.last_reply == "break":
            raise ValueError("no judge")
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10, 14):
            yield WordTask(WordData(prompt=f"Say {n}.", answer=str(n), system_prompt="Be short."), self.config.task)
"""
KEYS = '''
import verifiers.v1 as vf

__all__ = ["Keys"]

class Codes(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look(self, key: str) -> str:
        """The code of a key."""
        return f"code of {key}: 37"

class KeyTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Codes(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float("37" in trace.last_reply)

class Keys(vf.Taskset[KeyTask, vf.TasksetConfig]):
    def load(self):
        yield KeyTask(vf.TaskData(prompt="Code of a?"), self.config.task)

if __name__ == "__main__":
    Codes.run()
'''


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """The environments of a file of verifiers, and its rows."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def load(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        address = f"verifiers:{tmp_path}/{name}.py"
        mistakes = Mistakes()
        made.append(load_environments(EnvironmentArguments(environment=address, environment_seconds=170.0), mistakes))
        mistakes.raise_if_any()
        return made[-1], rows_of(None, data_flags(data_path=[address], data_output_path=str(tmp_path / "cache")), 4, 1)

    yield load
    for environments in made:
        environments.close()


@pytest.mark.skipif(IS_THERE, reason="needs a machine without the package verifiers")
def test_without_the_package():
    with pytest.raises(ThreestepError, match="--environment verifiers:NAME needs the package verifiers, 0.4 or later"):
        check_verifiers("verifiers:words", "--environment")


@needs_verifiers
def test_one_turn_and_weighted_rewards(opened):
    environments, rows = opened("vf_words", WORDS)
    assert environments.names == ("vf_words",)
    assert [row["ground_truth"] for row in rows] == ["10", "11", "12", "13"]
    assert rows[1]["messages"][-1] == {"role": "user", "content": "Say 11."}
    episode = environments.episode(rows[1], 1)
    opening = episode.reset().result()
    assert opening.messages == rows[1]["messages"]
    assert [message["role"] for message in opening.messages] == ["system", "user"]
    reply = episode.step(said("11")).result()
    assert (reply.messages, reply.reward, reply.done) == ([], 1.5, True)
    assert {"right": 1.0, "short": 1.0, "length": 2.0}.items() <= episode.figures.items()
    episode.close()


@needs_verifiers
def test_a_package_by_its_init(opened, tmp_path):
    (tmp_path / "vf_word_package").mkdir()
    environments, rows = opened("vf_word_package/__init__", WORDS)
    assert environments.names == ("vf_word_package",) and len(rows) == 4


@needs_verifiers
def test_an_error_of_a_reward_is_a_failure(opened):
    environments, rows = opened("vf_broken_words", WORDS)
    warned = []
    episode = environments.episode(rows[0], 1, warn=warned.append)
    episode.reset().result()
    assert episode.step(said("break")).result().done
    assert "no judge" in warned[0]
    assert episode.figures["environment_failures"] == 1
    with pytest.raises(ThreestepError, match="expects a task from 0 to 3 in its column 'task', got 9"):
        environments.episode({**rows[0], "task": 9}, 1).reset().result()


@needs_verifiers
def test_tools_are_called_by_their_servers(opened):
    environments, rows = opened("vf_tools", KEYS)
    episode = environments.episode(rows[0], 1)
    opening = episode.reset().result()
    (tool,) = opening.tools
    reply = episode.step(said("", Call(tool["function"]["name"], {"key": "a"}), Call("nothing", {}))).result()
    assert [message["content"] for message in reply.messages] == ["code of a: 37", "error: unknown tool 'nothing'"]
    last = episode.step(said("37")).result()
    assert (last.reward, last.done) == (1.0, True)


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_taskset", "does not load: ModuleNotFoundError: taskset 'no_such_taskset' not found"),
        ("nothing.py", "expects an existing file, got 'nothing.py'"),
        ("", "expects verifiers:NAME, a taskset or its file"),
    ],
)
def test_mistakes(name, sentence):
    mistakes = Mistakes()
    load_environments(EnvironmentArguments(environment=f"verifiers:{name}"), mistakes)
    assert sentence in mistakes.sentences[0]


@needs_verifiers
def test_a_name_that_another_module_has(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tomllib.py").write_text(WORDS)
    mistakes = Mistakes()
    load_environments(EnvironmentArguments(environment=f"verifiers:{tmp_path}/tomllib.py"), mistakes)
    assert "--environment expects a file whose name no other module has" in mistakes.sentences[0]
