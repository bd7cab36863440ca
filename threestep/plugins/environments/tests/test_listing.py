"""The list of environments: classes of files, which are not run, and installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest

from threestep.plugins.environments import addresses
from threestep.plugins.environments.listing import listed
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def test_classes_with_the_methods_are_listed(environment_file):
    names = [each.address.rpartition(":")[2] for each in listed([str(environment_file)])]
    assert names[:3] == ["Sound", "Greets", "Moody"]
    assert listed([str(environment_file)])[0].about == "Asks once more, then pays for the answer."


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


def test_a_place_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(ThreestepError, match="expects Python files and folders, got"):
        listed([str(tmp_path / "nothing.py")])


def test_installed_ones_are_listed(monkeypatch, tmp_path):
    entry = importlib.metadata.EntryPoint("Maze", "my_mazes:Maze", addresses.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == addresses.GROUP else [])
    assert listed([str(tmp_path)]) == [("Maze", "installed: my_mazes:Maze")]
