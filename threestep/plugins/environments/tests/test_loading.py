"""Environments and tools from a user's file: found, checked before anything is drawn, and routed by a column."""

from __future__ import annotations

import pytest

from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.interface import AssistantMessage, Call
from threestep.plugins.environments.loading import load_environments
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

FILE = '''
class Good:
    def reset(self, row):
        return [{"role": "user", "content": "good"}], None
    async def step(self, message):
        return [], 1.0, True
    def close(self): ...

class Seeded(Good):
    def reset(self, row, seed):
        return [{"role": "user", "content": f"seed {seed}"}], None

class Greets(Good):
    def reset(self, row):
        row["messages"].insert(0, {"role": "system", "content": str(row["info"]["seen"])})
        row["messages"][-1]["content"] += "!"
        row["info"]["seen"].append(1)
        return row["messages"], None

class Short(Good):
    step = None

class Wide(Good):
    def step(self, message, more): ...

class Unmade(Good):
    def __init__(self, size): ...

number = 3

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b

also_add = add

def noise() -> bytes:
    """Answer no text."""
    return b"ok \\xff"

class tools(Good): ...

def untyped(a):
    """Add."""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "own.py"
    path.write_text(FILE)
    return str(path)


def loaded(file, environment=(), tools=()):
    flags = EnvironmentArguments(
        environment=",".join(f"{file}:{name}" for name in environment) or None,
        tools=", ".join(f"{file}:{name}" for name in tools) or None,
    )
    mistakes = Mistakes()
    note_mistakes(flags, mistakes)
    found = load_environments(flags, mistakes)
    mistakes.raise_if_any()
    return found


def opening_of(environments, row):
    episode = environments.episode(row, seed=5)
    return episode if episode is None else episode.reset().result(5).messages[-1]["content"]


def test_without_the_flags_nobody_answers(file):
    assert loaded(file) is None
    assert not EnvironmentArguments().is_on


def test_one_environment_answers_every_row(file):
    environments = loaded(file, ["Good"])
    assert opening_of(environments, {}) == opening_of(environments, {"environment": "Good"}) == "good"
    assert environments.episode({"environment": None}, 0) is environments.episode({"environment": ""}, 0) is None
    with pytest.raises(ThreestepError, match="the column 'environment' expects one of Good, .* got 'Goo'; did you"):
        environments.name_of({"environment": "Goo"})
    environments.close()


def test_samples_of_a_prompt_share_nothing(file):
    """An environment that puts a message before its row's: its siblings' rows are as they were."""
    environments = loaded(file, ["Greets"])
    row = {"messages": [{"role": "user", "content": "go"}], "info": {"seen": []}}
    openings = [environments.episode(row, seed).reset().result(5) for seed in (1, 2, 3)]
    assert [len(opening.messages) for opening in openings] == [2, 2, 2]
    assert row == {"messages": [{"role": "user", "content": "go"}], "info": {"seen": []}}
    environments.close()


def test_several_are_routed_by_the_column_and_the_seed_is_passed(file):
    environments = loaded(file, ["Good", "Seeded"], ["add"])
    assert environments.names == ("Good", "Seeded", "tools")
    assert opening_of(environments, {"environment": "Seeded"}) == "seed 5"
    assert (
        opening_of(environments, {"environment": "tools", "messages": [{"role": "user", "content": "3 + 4"}]})
        == "3 + 4"
    )
    with pytest.raises(ThreestepError, match="tools, or nothing .*, got a row without it; mend the row .* 'Play'"):
        environments.name_of({"prompt": "Play"})
    environments.close()


def test_tools_answer_any_row(file):
    environments = loaded(file, tools=["add"])
    episode = environments.episode({"messages": [{"role": "user", "content": "?"}], "environment": "other"}, 0)
    opening = episode.reset().result(5)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    reply = episode.step(AssistantMessage("", "", calls=(Call("add", {"a": 3, "b": 4}),))).result(5)
    assert reply.messages == [{"role": "tool", "name": "add", "content": "7"}] and episode.figures["calls"] == 1
    environments.close()


def test_what_a_tool_answers_is_mended_and_counted_once(file):
    environments = loaded(file, tools=["noise"])
    episode = environments.episode({"messages": [{"role": "user", "content": "?"}]}, 0)
    episode.reset().result(5)
    reply = episode.step(AssistantMessage("", "", calls=(Call("noise", {}), Call("noise", {})))).result(5)
    assert [message["content"] for message in reply.messages] == ["ok \ufffd"] * 2
    assert (episode.figures["mended_answers"], episode.figures["cut_answers"]) == (2, 0)
    environments.close()


@pytest.mark.parametrize(
    ("environment", "tools", "message"),
    [
        (["Short"], [], r"--environment expects a class with reset\(row\), .*Short', which has no step"),
        (["Wide"], [], r"--environment expects reset\(row\) or .*, got step\(message, more\) in .*: missing a"),
        (["Unmade"], [], "--environment expects a class that is made without arguments, got .*Unmade': TypeError"),
        (["number"], [], "--environment expects a function, got .*number', which is int"),
        (["Goood"], [], "has no 'Goood'; did you mean 'Good'"),
        ([], ["untyped"], "--tools: the tool 'untyped' expects a docstring"),
        (["Good", "Good"], [], "--environment expects different names, got Good, Good; rename one"),
        (["tools"], [], "--environment expects a class of another name than tools, which is that of --tools; rename"),
        ([], ["add", "also_add"], "--tools expects functions of different names, got add, add; rename one"),
        (["Short"], ["untyped"], "2 mistakes in the configuration"),
    ],
)
def test_mistakes_are_said_before_anything_runs(file, environment, tools, message):
    with pytest.raises(ThreestepError, match=message):
        loaded(file, environment, tools)


def test_a_parser_that_nobody_knows_is_a_mistake():
    mistakes = Mistakes()
    note_mistakes(EnvironmentArguments(tool_parser="herms", tools="tool.py"), mistakes)
    assert mistakes.sentences == [
        "--tools expects FILE.py:NAME, a Python file and a name in it, got 'tool.py'",
        "--tool_parser expects one of auto, hermes, llama, pythonic, got 'herms'; did you mean 'hermes'?",
    ]


def test_failures_are_said_once(file, capsys):
    environments = loaded(file, ["Good"])
    for _ in range(3):
        environments._warn("it failed")
    assert capsys.readouterr().out.count("it failed") == 1
    environments.close()
