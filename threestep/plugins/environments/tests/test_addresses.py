"""Where environments come from: files, and installed packages by their entry points."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from threestep.plugins.environments import addresses
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.loading import load_environments
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


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
        ("Mase", "which are Gone, Maze, Number, got 'Mase'; did you mean 'Maze'?"),
        ("Number", "expects a class, got 'Number', which is int"),
        ("Gone", "'packaged_mazes:Away' does not load: AttributeError"),
        ("here:Maze", "expects FILE.py:NAME, a Python file and a name in it, got 'here:Maze'"),
    ],
)
def test_mistakes(install, given, sentence):
    install(Maze="packaged_mazes:Maze", Number="packaged_mazes:number", Gone="packaged_mazes:Away")
    with pytest.raises(ThreestepError) as mistake:
        addresses.load_environment(given)
    assert sentence in str(mistake.value)
