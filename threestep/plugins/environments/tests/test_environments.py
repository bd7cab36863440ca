"""Where environments, tools and their rows come from, and mistakes that are said before anything is drawn."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest

from tests.support.data_flags import data_flags
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.environments import addresses
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.listing import listed
from threestep.plugins.environments.loading import load_environments
from threestep.plugins.environments.rows import rows_of
from threestep.plugins.environments.tests.conftest import said
from training.step3_ppo.flags.checks import Components, checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

OWN = '''
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
    path.write_text(OWN)
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


def test_one_environment_answers_every_row(file):
    assert loaded(file) is None and not EnvironmentArguments().is_on  # nobody does without the flags
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
    row = {"environment": "tools", "messages": [{"role": "user", "content": "3 + 4"}]}
    assert opening_of(environments, row) == "3 + 4"
    with pytest.raises(ThreestepError, match="tools, or nothing .*, got a row without it; fix the row .* 'Play'"):
        environments.name_of({"prompt": "Play"})
    environments.close()


def test_tools_answer_any_row(file):
    environments = loaded(file, tools=["add", "noise"])
    episode = environments.episode({"messages": [{"role": "user", "content": "?"}], "environment": "other"}, 0)
    opening = episode.reset().result(5)
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "noise"]
    reply = episode.step(said("", Call("add", {"a": 3, "b": 4}))).result(5)
    assert reply.messages == [{"role": "tool", "name": "add", "content": "7"}] and episode.figures["calls"] == 1
    reply = episode.step(said("", Call("noise", {}), Call("noise", {}))).result(5)
    assert [message["content"] for message in reply.messages] == ["ok \ufffd"] * 2
    assert (episode.figures["mended_answers"], episode.figures["cut_answers"]) == (2, 0)  # once each
    environments.close()


@pytest.mark.parametrize(
    ("environment", "tools", "message"),
    [
        (["Short"], [], r"--environment expects a class with reset\(row\), .*Short', which has no step"),
        (["Wide"], [], r"--environment expects reset\(row\) or .*, got step\(message, more\) in .*: missing a"),
        (
            ["Unmade"],
            [],
            "--environment expects a class that can be created without arguments, got .*Unmade': TypeError",
        ),
        (["number"], [], "--environment expects a function, got .*number', which is of type int"),
        (["Goood"], [], "has no 'Goood'; did you mean 'Good'"),
        ([], ["untyped"], "--tools: the tool 'untyped' needs a docstring"),
        (["Good", "Good"], [], "--environment expects different names, got Good, Good; rename one"),
        (
            ["tools"],
            [],
            "--environment expects a class with a name other than tools, which is reserved for --tools; rename",
        ),
        ([], ["add", "also_add"], "--tools expects functions with different names, got add, add; rename one"),
        (["Short"], ["untyped"], "2 mistakes in the configuration"),
    ],
)
def test_mistakes_are_said_before_anything_runs(file, environment, tools, message):
    with pytest.raises(ThreestepError, match=message):
        loaded(file, environment, tools)


def test_a_parser_that_nobody_knows_is_a_mistake_and_failures_are_said_once(file, capsys):
    mistakes = Mistakes()
    note_mistakes(EnvironmentArguments(tool_parser="herms", tools="tool.py"), mistakes)
    assert mistakes.sentences == [
        "--tools expects FILE.py:NAME, a Python file and a name defined in it, got 'tool.py'",
        "--tool_parser expects one of auto, hermes, llama, pythonic, got 'herms'; did you mean 'hermes'?",
    ]
    environments = loaded(file, ["Good"])
    for _ in range(3):
        environments._warn("it failed")
    assert capsys.readouterr().out.count("it failed") == 1
    environments.close()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Offer the classes of a module, by name, as an installed package does."""
    (tmp_path / "packaged_mazes.py").write_text(
        "class Maze:\n"
        "    def reset(self, row): return [{'role': 'user', 'content': 'go'}], None\n"
        "    def step(self, message): return [], 2.0, True\n"
        "    def close(self): ...\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def offered(**values):
        entries = [importlib.metadata.EntryPoint(name, value, addresses.GROUP) for name, value in values.items()]
        monkeypatch.setattr(
            "importlib.metadata.entry_points", lambda group: entries if group == addresses.GROUP else []
        )

    yield offered
    sys.modules.pop("packaged_mazes", None)


def test_an_installed_environment_is_named_alone(install):
    install(Maze="packaged_mazes:Maze")
    flags, mistakes = EnvironmentArguments(environment="Maze"), Mistakes()
    note_mistakes(flags, mistakes)
    environments = load_environments(flags, mistakes)
    assert mistakes.sentences == []
    assert environments.names == ("Maze",)
    episode = environments.episode({"environment": "Maze"}, 1)
    assert episode.reset().result().messages[0]["content"] == "go"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("Mase", "environment (Gone, Maze, Number), got 'Mase'; did you mean 'Maze'?"),
        ("Number", "expects a class, got 'Number', which is of type int"),
        ("Gone", "'packaged_mazes:Away' does not load: AttributeError"),
        ("here:Maze", "expects FILE.py:NAME, a Python file and a name defined in it, got 'here:Maze'"),
    ],
)
def test_mistakes_in_the_name_of_an_installed_one(install, given, sentence):
    install(Maze="packaged_mazes:Maze", Number="packaged_mazes:number", Gone="packaged_mazes:Away")
    with pytest.raises(ThreestepError) as mistake:
        addresses.load_environment(given)
    assert sentence in str(mistake.value)


def test_classes_and_installed_ones_are_listed(environment_file, tmp_path, monkeypatch):
    names = [each.address.rpartition(":")[2] for each in listed([str(environment_file)])]
    assert names[:3] == ["Sound", "Greets", "Moody"]
    assert listed([str(environment_file)])[0].about == "Asks once more, then pays for the answer."
    with pytest.raises(ThreestepError, match="expects Python files and folders, got"):
        listed([str(tmp_path / "nothing.py")])
    entry = importlib.metadata.EntryPoint("Maze", "my_mazes:Maze", addresses.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == addresses.GROUP else [])
    (tmp_path / "empty").mkdir()
    assert listed([str(tmp_path / "empty")]) == [("Maze", "installed: my_mazes:Maze")]


def test_files_are_not_run_and_unreadable_ones_are_left_out(tmp_path):
    (tmp_path / "runs.py").write_text(
        "raise SystemExit\nclass A:\n def reset(s,r):...\n def step(s,m):...\n def close(s):...\n"
    )
    (tmp_path / "broken.py").write_text("class (")
    (tmp_path / "server.py").write_text(
        "class B(OpenEnvironment): ...\nclass _Hidden(B): ...\nclass C:\n def reset(s): ...\n"
    )
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "runs.py").write_text((tmp_path / "runs.py").read_text())
    assert [each.address for each in listed([str(tmp_path)])] == [f"{tmp_path}/runs.py:A", f"{tmp_path}/server.py:B"]


def test_rows_of_the_command_line_and_of_data(tmp_path):
    (row,) = rows_of('{"prompt": "a", "key": 1}', data_flags(data_path=[]), 4, 1)
    assert row == {"prompt": "a", "key": 1, "messages": [{"role": "user", "content": "a"}], "ground_truth": None}
    assert rows_of(None, data_flags(data_path=[]), 4, 1)[0]["prompt"] == ""
    with pytest.raises(ThreestepError, match="--row expects a JSON object"):
        rows_of("[1]", data_flags(data_path=[]), 4, 1)
    rows = [{"prompt": f"q{n}", "ground_truth": f"a{n}", "topic": "sums"} for n in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_flags(data_path=[f"jsonl:{path}"], data_output_path=str(tmp_path / "cache"))
    found = rows_of(None, data, 4, 1)
    assert [row["messages"] for row in found] == [[{"role": "user", "content": f"q{n}"}] for n in range(4)]
    assert [row["ground_truth"] for row in found] == [f"a{n}" for n in range(4)]
    assert found[0]["topic"] == "sums"


LOOKUP = "examples/environments/lookup.py:Lookup"


def components(critic: str = "c", **given) -> Components:
    names = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic, "num_samples_per_prompt": 2}
    return checked_components(
        ppo_flags(**{**names, "reward": "environment", "advantage": "grpo", "environment": LOOKUP, **given})
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --environment examples/env"),
        (
            {"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2},
            "--vllm_tensor_parallel_size 2 makes ranks generate t",
        ),
        (
            {"parallel_thinking": True},
            "generate turn by turn, but --parallel_thinking generates paths in parallel; remove",
        ),
        (
            {"rank_timeout": 300.0},
            "adds up to 540 seconds, but other ranks wait only for --rank_timeout 300; lower the first",
        ),
        ({"environment": None, "max_tool_calls": 3}, "--max_tool_calls 3 limits conversations, but this run has none"),
        ({"environment": None}, "--reward environment needs an environment, but"),
        ({"replay_routers": "follow"}, "--environment, --tools generate turn by turn, and turns record no experts"),
    ],
)
def test_what_does_not_go_with_environments(given, said):
    with pytest.raises(ThreestepError, match=said):
        components(**given)


def test_environments_are_loaded_unless_a_replay_has_their_answers(tmp_path):
    found = components("")
    assert found.partners.environments.names == ("Lookup",) and not found.with_reward_model
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    replayed = components("", rollout_replay=str(tmp_path))
    assert replayed.partners.is_there and replayed.partners.environments is None
