"""The files beside the code, and what a run trusts: pins with hashes, no versions by chance, no files that anybody may
write to; archives that are the same from every checkout; the container file, versions, subjects of commits."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
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


def requirements() -> list[Requirement]:
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


# Releases.

HASHED = sorted(ROOT.glob("constraints-hashed*.txt"))
PERMISSIONS = {"contents": ("read", "write"), "id-token": ("write",), "attestations": ("write",)}
PERMISSIONS |= {"artifact-metadata": ("write",)}


def hashed(path: Path) -> list[tuple[Requirement, list[str]]]:
    """(requirement, digests) of each entry."""
    lines = "".join(line + "\n" for line in path.read_text().splitlines() if not line.startswith("#"))
    entries = [entry.split("--hash=sha256:") for entry in lines.replace("\\\n", " ").splitlines()]
    return [(Requirement(name), [digest.strip() for digest in digests]) for name, *digests in entries]


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.name)
def test_every_pin_has_hashes_and_the_version_of_the_constraints(path):
    constraints: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            constraints.setdefault(plain(pin.name), set()).add(str(pin.specifier))
    differing = re.search(r"differ in them: (.+)\.$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1].split(
        ", "
    )
    if path.name.endswith("-verifiers.txt"):
        differing += ["openai", "mcp", "mcp-types"]  # FREED of scripts/lock.py
    entries = hashed(path)
    assert len(entries) > 90
    for requirement, digests in entries:
        assert digests and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests), requirement
        assert str(requirement.specifier).startswith("==")
        name = plain(requirement.name)
        if name in differing or name.startswith(("nvidia-", "cuda-")) or name == "triton":
            continue
        assert str(requirement.specifier) in constraints[name], requirement


def test_every_extra_is_pinned():
    """Each requirement of each extra, in the file that serves it."""
    names = {path.name: {plain(requirement.name) for requirement, _ in hashed(path)} for path in HASHED}
    block = (ROOT / "setup.py").read_text().split("extras_require={")[1].split("}")[0]
    extras = dict(re.findall(r'^        "(\w+)": \[(.+?)\]', block, re.MULTILINE))
    assert {"vllm", "web", "mlflow", "openenv", "verifiers", "gymnasium", "quantized", "notebook"} <= set(extras)
    for extra, words in extras.items():
        needed = {plain(Requirement(word).name) for word in ast.literal_eval(f"[{words}]")}
        files = ["constraints-hashed.txt"] * (extra != "vllm") + ["constraints-hashed-vllm.txt"] * (extra != "openenv")
        files = ["constraints-hashed-verifiers.txt"] if extra == "verifiers" else files
        assert all(needed <= names[file] for file in files), extra


def refused(script: str, *words: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / script, *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_two_releases_that_differ_are_refused(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        for name in ("threestep-1.whl", "threestep-1.tar.gz"):
            (tmp_path / folder / name).write_text("the same")
        subprocess.run("sha256sum threestep* >SHA256SUMS", shell=True, cwd=tmp_path / folder, check=True)
    folders = [str(tmp_path / name) for name in ("first", "second", "packages")]
    subprocess.run(["bash", ROOT / "scripts" / "compare_releases.sh", *folders], check=True, capture_output=True)
    assert sorted(path.name for path in (tmp_path / "packages").iterdir()) == ["threestep-1.tar.gz", "threestep-1.whl"]
    (tmp_path / "second" / "threestep-1.whl").write_text("another")
    said = refused("compare_releases.sh", *folders)
    assert said.endswith("were built from one commit and differ: see above\n")


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one commit, and a stand-in for the environment of a release."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "training").mkdir()
    (root / "training" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "CHANGELOG.md").write_text("## [0.1.0] - 2026-11-26\n")
    (root / "constraints-hashed.txt").write_text("pip==1 --hash=sha256:0\n")
    (root / ".gitignore").write_text(".venv_release\n")
    (root / ".venv_release" / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("true"), root / ".venv_release" / "bin" / "python")
    stamp = "cksum <constraints-hashed.txt >.venv_release/release.stamp"
    identity = "-c user.name=a -c user.email=a@b"
    commit = f"git init --quiet && git add --all && git {identity} commit --quiet --message one"
    subprocess.run(f"{stamp} && {commit}", shell=True, cwd=root, check=True)
    return root


@pytest.mark.parametrize(
    ("file", "text", "committed", "expected"),
    [
        ("CHANGELOG.md", "## [0.1.0] - soon\n", False, "have changes that no commit holds: commit or stash them"),
        ("CHANGELOG.md", "## [Unreleased]\n", True, "CHANGELOG.md has no line '## [0.1.0] - DATE', the version of"),
    ],
)
def test_a_release_is_built_from_a_commit_with_its_changelog(checkout, file, text, committed, expected):
    (checkout / file).write_text(text)
    if committed:
        subprocess.run("git -c user.name=a -c user.email=a@b commit -qam two", shell=True, cwd=checkout, check=True)
    assert expected in refused(str(checkout / "scripts" / "build_release.sh"))


def test_a_tag_that_is_not_the_version_is_refused(checkout):
    said = refused(str(checkout / "scripts" / "build_release.sh"), GITHUB_REF_TYPE="tag", GITHUB_REF_NAME="v0.2.0")
    assert said == "error: the tag is v0.2.0, and training/__init__.py has version 0.1.0\n"


# The container file, versions, commits.


def instructions():
    """(instruction, the rest) of each in the Containerfile, with lines joined as its readers join them."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("device", "expected", "code"),
    [("cpu", "--no-deps --index-url https://download.pytorch.org/whl/cpu", 0), ("cuda", "torch===", 0), ("tpu", "", 1)],
)
def test_its_commands_install_torch_for_the_device(device, expected, code, tmp_path):
    """The steps that call pip, with a pip and a Python that print their words and nothing else on PATH but sed."""
    for name in ("pip", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sed").symlink_to(shutil.which("sed"))
    steps = "\n".join(rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    steps = steps.replace("/tmp/", f"{tmp_path}/")
    environment = {"PATH": str(tmp_path), "DEVICE": device}
    done = subprocess.run(["/bin/sh", "-euc", steps], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout
    if code:
        assert done.stderr.strip() == f"error: DEVICE expects cpu or cuda, got {device}"
    else:
        version = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
        assert f"torch{'===' if device == 'cuda' else '=='}{version}{'+cpu' * (device == 'cpu')}" in done.stdout
        calls = [line for line in done.stdout.splitlines() if line.startswith("pip ")]
        assert all("--require-hashes" in call for call in calls[:-1])
        assert calls[-1].endswith("--no-build-isolation --no-deps --editable .")
        assert not any("--extra-index-url" in call for call in calls)  # each call asks one index
        assert (tmp_path / "pip.txt").read_text().startswith("pip==")
        assert (tmp_path / "names.txt").read_text() == "python scripts/lock.py --names\n"


def test_the_page_of_versions_says_what_setup_and_the_pins_say():
    text = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| (\w+)[^|]* \| ([\d.]+ \| [\d.]+) \|$", text, re.MULTILINE))
    setup, pins = ((ROOT / name).read_text() for name in ("setup.py", "constraints.txt"))
    assert rows["Python"].split(" | ")[0] == re.search(r'python_requires=">=([\d.]+)"', setup)[1]
    for name in ("torch", "transformers", "DeepSpeed"):
        oldest, tested = rows[name].split(" | ")
        required = Requirement(re.search(rf'"({name.lower()}[>=].*?)"', setup)[1])
        assert str(required.specifier) == f">={oldest}"
        assert re.search(rf"^{name.lower()}=={re.escape(tested)}$", pins, re.MULTILINE)


@pytest.mark.parametrize(("message", "code"), [("x" * 72 + "\n\n" + "y" * 99, 0), ("x" * 73 + "\n", 1)])
def test_the_subject_of_a_commit_is_short(message, code, tmp_path):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entry = next(hook["entry"] for hook in hooks if hook["id"] == "commit-subject")
    (tmp_path / "message").write_text(message)
    done = subprocess.run([*shlex.split(entry), tmp_path / "message"], capture_output=True, text=True)
    assert done.returncode == code
    assert ("the subject has 73 characters, at most 72: xxx" in done.stderr) == bool(code)
