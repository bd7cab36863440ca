"""Plugins of other packages are found by their entry points; what is wrong with one is said in a line."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.new_models import save_new_model
from training.utils.base.errors import ThreestepError
from training.utils.plugins import registry
from training.utils.plugins.plugin import Hooks, Plugin
from training.utils.plugins.registry import added, plugin_module, plugins

ROOT = Path(__file__).parents[4]
GREETS = """
from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin("greeting", "greets", commands={"greet": Command("greeting.hello", "says hello")})
"""

CHEERS = """
from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

PLUGIN = Plugin(
    "cheering",
    "cheers",
    flags={EVERY_STEP: ("cheering.hello:Cheers",)},
    topics={"cheers": "Cheers"},
    hooks=Hooks(check="cheering.hello:check", at_end="cheering.hello:cheer"),
)
"""
CHEERS_CODE = """
from dataclasses import dataclass
from training.utils.flags.flags import flag

@dataclass
class Cheers:
    topic = "cheers"
    cheers: int = flag(1, "How often.", "cheers >= 0")

def check(flags, mistakes):
    mistakes.require(flags.added.of(Cheers).cheers < 3, "--cheers expects fewer than 3; give fewer")

def cheer(ended):
    print("hurrah " * ended.settings["cheers"], ended.folder.path.name)
"""


def installed(folder: Path, name: str, code: str) -> None:
    """Write a package with an entry point of ours, as pip installs one."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    (folder / name / "hello.py").write_text("import sys\nprint('hello', *sys.argv[1:])\n")
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[threestep.plugins]\n{name} = {name}:PLUGIN\n")


def told(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `threestep` beside the packages of a folder."""
    return subprocess.run(
        [sys.executable, "-m", "threestep", *words], env={**os.environ, "PYTHONPATH": str(folder)}, cwd=ROOT,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return the plugins with packages of these names and sources."""

    def find(**codes):
        for name, code in codes.items():
            installed(tmp_path, name, code)
            monkeypatch.delitem(sys.modules, name, raising=False)  # of another test
        monkeypatch.syspath_prepend(tmp_path)
        return plugins.__wrapped__()

    return find


def test_a_package_adds_a_command(tmp_path):
    installed(tmp_path, "greeting", GREETS)
    listed = told(tmp_path, "--help")
    assert "  greet " in listed.stdout and "says hello" in listed.stdout
    assert told(tmp_path, "greet", "you").stdout == "hello you\n"


def test_the_plugins_of_the_project_come_in_the_order_of_their_names(found):
    known = found(greeting=GREETS)
    assert list(known) == sorted(known) and "greeting" in known
    folders = {path.parent.name for path in (ROOT / "threestep" / "plugins").glob("*/__init__.py")}
    assert folders == known.keys() - {"greeting"}
    assert all(name == plugin.name for name, plugin in known.items())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
        ("PLUGIN = 3", "broken:PLUGIN is 3, not a Plugin"),
        (
            GREETS.replace('"greets"', '"", tables={"rewardss": {}}'),
            "it adds to rewardss, but the only tables are adapters, advantages, advice",
        ),
        (GREETS.replace('"greets"', '"", needs=("attic",)'), "it needs the plugin 'attic', which is not installed"),
    ],
)
def test_a_plugin_that_cannot_work_is_left_out_with_a_line(found, capsys, code, reason):
    known = found(broken=code)
    assert not {"broken", "greeting"} & known.keys()
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1 and "is disabled" in said


def test_whoever_needs_a_plugin_that_is_left_out_is_left_out_too(found, capsys):
    needs = "from training.utils.plugins.plugin import Plugin\nPLUGIN = Plugin('%s', 'does', needs=('%s',))"
    assert not {"one", "two"} & found(one=needs % ("one", "two"), two=needs % ("two", "three")).keys()
    assert capsys.readouterr().err.count("is disabled") == 2


def test_two_that_add_the_same_and_one_that_is_not_there(found, monkeypatch):
    known = found(greeting=GREETS, other=GREETS.replace('"greeting"', '"other"'))
    monkeypatch.setattr("training.utils.plugins.registry.plugins", lambda: known)
    with pytest.raises(ThreestepError, match="'other' adds 'greet' to commands, but so does the plugin 'greeting'"):
        added("commands", ())
    with pytest.raises(ThreestepError, match="this needs the plugin 'attic', which is not installed"):
        plugin_module("attic", "pages")
    with pytest.raises(ThreestepError, match="two plugins are named 'greeting'"):
        found(third=GREETS)


def test_a_command_of_the_core_is_not_replaced(tmp_path):
    installed(tmp_path, "greeting", GREETS.replace('"greet"', '"sft"'))
    done = told(tmp_path, "--help")
    assert done.returncode == 2 and "the plugin 'greeting' adds" in done.stderr


@pytest.mark.needs_plugin("embedded")
def test_a_package_adds_flags_a_check_and_an_end_to_a_step(tmp_path):
    """Tables, a command and an observer: tests/end_to_end/test_write_a_plugin.py."""
    installed(tmp_path, "cheering", CHEERS)
    (tmp_path / "cheering" / "hello.py").write_text(CHEERS_CODE)
    assert "--cheers CHEERS" in told(tmp_path, "reward", "--help", "cheers").stdout
    start, run = str(tmp_path / "start"), str(tmp_path / "run")
    save_new_model(Path(start), hidden_size=16, num_hidden_layers=1)
    words = [
        "sft", "--model_name_or_path", start, "--output_dir", run, "--data_path", "embedded", "--max_train_rows", "4",
        "--max_seq_len", "48", "--data_output_path", str(tmp_path / "cache"), "--max_train_steps", "1",
        "--max_eval_rows", "2", "--dtype", "fp32", "--per_device_train_batch_size", "2",
    ]  # fmt: skip
    refused = told(tmp_path, *words, "--cheers", "3")
    assert refused.returncode == 2 and "--cheers expects fewer than 3" in refused.stderr
    done = told(tmp_path, *words, "--cheers", "2")
    assert done.returncode == 0, done.stderr
    assert "hurrah hurrah  run" in done.stdout
    assert "cheers: 2" in (tmp_path / "run" / "config.yaml").read_text()


def test_hooks_come_after_those_of_plugins_that_are_needed(monkeypatch):
    def adding(name: str, *needs: str) -> Plugin:
        return Plugin(name, "", needs=needs, hooks=Hooks(at_end=f"os.path:{name}"))

    names = {"basename": ("join",), "exists": (), "isdir": ("basename", "exists"), "join": ()}
    found = {name: adding(name, *needs) for name, needs in names.items()}
    monkeypatch.setattr(registry, "plugins", lambda: found)
    assert [hook.__name__ for hook in registry.hooks("at_end")] == ["join", "basename", "exists", "isdir"]
    assert registry.hooks("at_start") == []


def _named_modules() -> list[Any]:
    """The plugin and the module of every literal plugin_module(PLUGIN, MODULE)."""
    files = [path for folder in ("threestep", "training") for path in (ROOT / folder).rglob("*.py")]
    calls = (each for path in files for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = (call.args for call in calls if isinstance(call, ast.Call) and "plugin_module" in ast.unparse(call.func))
    constants = ([part.value for part in args if isinstance(part, ast.Constant)] for args in named)
    pairs = sorted({(str(found[0]), str(found[1])) for found in constants if len(found) == 2})
    return [pytest.param(*pair, marks=pytest.mark.needs_plugin(pair[0])) for pair in pairs]


@pytest.mark.parametrize(("plugin", "module"), _named_modules())
def test_a_plugin_has_the_modules_that_are_named(plugin, module):
    assert importlib.util.find_spec(f"{registry.GROUP}.{plugin}.{module}") is not None
