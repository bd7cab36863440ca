"""The files of a release: workflows, pins with hashes, archives that are the same from every checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_supply_chain import plain

ROOT = Path(__file__).parents[1]
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
