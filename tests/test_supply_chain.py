"""What a run trusts: no pickles, no code from a hub, no versions by chance, no files that anybody may write to."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PICKLERS = ("pickle", "dill", "cloudpickle", "joblib", "shelve")
PROGRAM = """
import json, os, sys
from training.utils.run.program import run_program

def main(argv):
    from training.utils.checkpoints.folder import CheckpointFolder
    from training.utils.run.run_folder import RunFolder
    folder = RunFolder("run/inner", is_main_rank=True)
    folder.write_config({"seed": 1}, "a run")
    folder.append_samples([{"prompt": "x"}])
    checkpoints = CheckpointFolder("run/inner")
    checkpoints.begin(1)
    (checkpoints.partial(1) / "a").write_text("b")
    checkpoints.publish(1, {})
    print(json.dumps({name: os.environ.get(name) for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")}))

run_program(main)
"""


def distrusted(source: str) -> list[str]:
    """What no file of training/ may hold: what unpickles, runs text as code, or opens files to everybody."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            from_one = isinstance(node, ast.ImportFrom)
            names = [node.module or ""] if from_one else [name.name for name in node.names]
            found += [
                name for name in names if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib", "shelve")
            ]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unsafe = called == "torch.load" and given.get("weights_only") != "True"
            unsafe |= called in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "os.chmod", "os.system")
            unsafe |= given.get("allow_pickle") == "True" or given.get("trust_remote_code") == "True"
            found += [called] if unsafe else []
    return found


@pytest.mark.parametrize(
    "planted",
    ["import pickle", "from dill import loads", "torch.load(path)", "torch.load(path, weights_only=False)",
     "eval(text)", "yaml.load(text)", "np.load(path, allow_pickle=True)", "load(name, trust_remote_code=True)"],
)  # fmt: skip
def test_what_is_distrusted_is_found(planted):
    assert distrusted(planted)


def test_nothing_is_unpickled():
    assert not distrusted("torch.load(path, weights_only=True); load(trust_remote_code=flag); yaml.safe_load(text)")
    files = [path for room in ("training", "examples") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    assert {str(path): found for path in files if (found := distrusted(path.read_text()))} == {}


def requirements() -> list[Requirement]:
    """Every requirement of setup.py, those of its extras too."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    lists = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    names = ("INSTALL_REQUIRES", "TEST_REQUIRES")
    assert set(names) <= set(lists)
    words = [part.value for name in names for part in ast.walk(lists[name]) if isinstance(part, ast.Constant)]
    return [Requirement(word) for word in words]


PINS = ("constraints.txt", "constraints-oldest.txt")


def pins(name: str) -> dict[str, list[tuple[str, Marker | None]]]:
    """(version, marker) of each package that the file pins."""
    found: dict[str, list[tuple[str, Marker | None]]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            version = re.fullmatch(r"==([^*,]+)", str(pin.specifier))
            assert version, f"{line} is no exact version"
            found.setdefault(plain(pin.name), []).append((version[1], pin.marker))
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("file", PINS)
def test_every_requirement_is_pinned_to_what_it_allows(file):
    pinned = pins(file)
    for requirement in requirements():
        versions = pinned.get(plain(requirement.name))
        assert versions, f"setup.py asks for {requirement.name}, which {file} does not pin"
        assert all(requirement.specifier.contains(version) for version, _ in versions), requirement


@pytest.mark.parametrize("name", ["torch", "transformers", "deepspeed"])
def test_the_oldest_pins_are_the_oldest_that_are_promised(name):
    (requirement,) = [one for one in requirements() if one.name == name]
    (promised,) = [str(part.version) for part in requirement.specifier]
    ((version, _),) = pins("constraints-oldest.txt")[name]
    assert version.startswith(promised)


def test_what_is_installed_is_pinned():
    """On the Python that the pins were made for, each requirement and what it requires itself, without extras."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the pins are of Python 3.11")
    torch = importlib.metadata.version("torch").split("+")[0]
    pinned = next(found for found in map(pins, PINS) if torch in [version for version, _ in found["torch"]])
    seen: set[str] = set()
    waiting = [requirement.name for requirement in requirements()]
    while waiting:
        name = plain(waiting.pop())
        if name in seen or name.startswith(("nvidia-", "cuda-")) or name == "triton":  # torch's to choose
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert name in pinned, f"{name} is installed for Threestep and not pinned"
        for word in distribution.requires or []:
            requirement = Requirement(word)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    assert len(seen) > 40


@pytest.mark.parametrize("umask", [0o000, 0o027])
def test_a_runs_files_are_the_users_and_nobody_elses_to_write(tmp_path: Path, umask: int):
    """With a umask of 0 as with a narrow one; and no service hears of the run."""
    command = [sys.executable, "-c", f"import os; os.umask({umask})\n{PROGRAM}"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '{"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}'
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(paths) >= 7
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~(umask | 0o002), f"{path}: {mode:o}"
