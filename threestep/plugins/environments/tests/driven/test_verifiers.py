"""Environments of verifiers as its package runs them: one turn, several rewards, tools, faults."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.data_flags import data_flags
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.driven.verifiers_tasks import check_verifiers
from threestep.plugins.environments.interface import AssistantMessage, Call
from threestep.plugins.environments.loading import load_environments
from threestep.plugins.environments.rows import rows_of
from training.utils.base.errors import Mistakes, ThreestepError

pytestmark = pytest.mark.unit

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
TOOLS = '''
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


def said(text, *calls):
    return AssistantMessage(text, text, calls=calls)


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
    environments, rows = opened("vf_tools", TOOLS)
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
