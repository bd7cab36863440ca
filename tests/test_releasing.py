"""The files of a release: workflows, pins with hashes, archives that are the same from every checkout."""

from __future__ import annotations

import ast
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.test_supply_chain import plain

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HASHED = sorted(ROOT.glob("constraints-hashed*.txt"))
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "setup.py").read_text())
PERMISSIONS = {"contents": ("read", "write"), "id-token": ("write",), "attestations": ("write",)}
PERMISSIONS |= {"artifact-metadata": ("write",)}


def workflow(path: Path) -> dict:
    read = yaml.safe_load(path.read_text())
    return {"on": read.pop(True), **read}  # YAML 1.1 reads the key `on` as a truth value


def steps(path: Path) -> list[dict]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_the_projects_scripts_on_pinned_actions(path):
    read = workflow(path)
    assert set(read) <= {"name", "on", "permissions", "concurrency", "jobs"} and read["permissions"] == {}
    for name, job in read["jobs"].items():
        assert job["timeout-minutes"] <= 90 and re.fullmatch(r"(ubuntu|macos)-[\d.]+", job["runs-on"]), name
        needed = job.get("needs", [])
        assert {needed} <= set(read["jobs"]) if isinstance(needed, str) else not needed
        for kind, right in job["permissions"].items():
            assert right in PERMISSIONS[kind], (name, kind)
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            script = re.fullmatch(r"bash (scripts/\w+\.sh)( --?\w+| \w+)*", step["run"])
            assert script and os.access(ROOT / script[1], os.X_OK), step["run"]
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}
    pinned = re.findall(r"^ +- uses: (.+)$", path.read_text(), re.MULTILINE)
    assert len(pinned) == sum("uses" in step for step in steps(path))
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in pinned)


def test_an_action_has_one_version_in_all_workflows():
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, version in re.findall(r"uses: ([^@]+)@(.+)$", path.read_text(), re.MULTILINE):
            versions.setdefault(name, set()).add(version)
    assert len(versions) >= 5 and all(len(found) == 1 for found in versions.values())


def test_the_tests_run_on_every_python_that_setup_names():
    jobs = workflow(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == PYTHONS
    oldest = re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())[1]
    assert oldest == PYTHONS[0]
    lenient = [name for name, job in jobs.items() if job.get("continue-on-error")]
    assert lenient == ["newest", "macos"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {"bash scripts/test.sh", "bash scripts/test.sh --oldest", "bash scripts/lock.sh --upgrade"} <= set(runs)
    of_ci = re.findall(r'"\$scripts/(\w+\.sh)"', (ROOT / ".ci" / "run").read_text())
    assert {f"bash scripts/{name}" for name in of_ci} <= set(runs)


def test_a_release_is_published_without_a_password_after_two_equal_builds():
    read = workflow(ROOT / ".github" / "workflows" / "release.yml")
    jobs, text = read["jobs"], (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert read["on"] == {"push": {"tags": ["v*"]}} and "secrets." not in text
    assert [jobs[name].get("needs") for name in ("build", "attest", "pypi", "release")] == [
        None,
        "build",
        "attest",
        "pypi",
    ]
    assert len(jobs["build"]["strategy"]["matrix"]["machine"]) == 2
    assert any("compare_releases.sh release second packages" in step.get("run", "") for step in jobs["attest"]["steps"])
    assert jobs["pypi"]["environment"]["name"] == "pypi" and jobs["pypi"]["permissions"] == {"id-token": "write"}
    publish = jobs["pypi"]["steps"][-1]
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@") and publish["with"]["attestations"] is True
    writers = [name for name, job in jobs.items() if "write" in job["permissions"].get("contents", "")]
    assert writers == ["release"]


def test_dependabot_looks_at_actions_the_container_and_vulnerable_packages():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {each["package-ecosystem"] for each in updates} == {"github-actions", "docker", "pip"}
    assert [each.get("open-pull-requests-limit") for each in updates if each["package-ecosystem"] == "pip"] == [0]


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


def test_the_environment_of_a_release_has_what_the_extra_names():
    script = (ROOT / "scripts" / "_release_environment.sh").read_text()
    installed = set(re.search(r"--constraint .+\\\n +(.+)$", script, re.MULTILINE)[1].split())
    listed = (ROOT / "setup.py").read_text().split("RELEASE_REQUIRES = [")[1].split("]")[0]
    assert installed == {Requirement(word).name for word in re.findall(r'"([^"]+)"', listed)}


def archive(path: Path, order: list[str], seconds: int, mode: int) -> bytes:
    """A .tar.gz of two files and a folder, as another machine might have made it."""
    with tarfile.open(path, "w:gz") as file:
        for name in order:
            member = tarfile.TarInfo(name)
            member.mtime, member.mode, member.uid, member.uname = seconds, mode, seconds % 1000, "somebody"
            if name.endswith("run"):
                member.mode |= 0o100
            if name == "a":
                member.type = tarfile.DIRTYPE
            member.size = 0 if name == "a" else 3
            file.addfile(member, None if name == "a" else io.BytesIO(name[-3:].encode()))
    return path.read_bytes()


def test_a_plain_archive_depends_on_its_files_alone(tmp_path):
    names = ["a", "a/one", "a/run"]
    made = [archive(tmp_path / "one.tar.gz", names, 1_000_001, 0o644)]
    made.append(archive(tmp_path / "two.tar.gz", names[::-1], 2_000_002, 0o664))
    assert made[0] != made[1]
    for name in ("one", "two"):
        command = [sys.executable, ROOT / "scripts" / "plain_archive.py", tmp_path / f"{name}.tar.gz"]
        subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    first, second = ((tmp_path / f"{name}.tar.gz").read_bytes() for name in ("one", "two"))
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as file:
        members = {member.name: member for member in file.getmembers()}
        assert {name: oct(member.mode) for name, member in members.items()} == {
            "a": "0o755", "a/one": "0o644", "a/run": "0o755",
        }  # fmt: skip
        assert {(member.mtime, member.uid, member.uname) for member in members.values()} == {(1700000000, 0, "")}
        assert file.extractfile("a/one").read() == b"one"
    assert gzip.decompress(first) and first[4:8] == b"\0\0\0\0"


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


def test_a_release_has_the_section_of_the_changelog_as_its_text(tmp_path):
    """With a gh that prints its words and the file of notes."""
    (tmp_path / "gh").write_text('#!/bin/sh\necho "$@"\ncat "$8"\n')
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "threestep-1.whl").write_text("")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": "v0.1.0"}
    command = ["bash", ROOT / "scripts" / "github_release.sh", tmp_path]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("release create v0.1.0 --verify-tag --title Threestep 0.1.0 --notes-file ")
    assert "The first release." in done.stdout and "[Unreleased]" not in done.stdout
    said = refused("github_release.sh", str(tmp_path), **{**variables, "GITHUB_REF_NAME": "v9.9.9"})
    assert said == "error: CHANGELOG.md has no section '## [9.9.9]'\n"


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


def test_a_folder_without_a_commit_is_refused(checkout):
    shutil.rmtree(checkout / ".git")
    said = refused(str(checkout / "scripts" / "build_release.sh"), GIT_CEILING_DIRECTORIES=str(checkout.parent))
    assert "expected a git checkout with a commit in" in said


def test_a_flag_is_no_folder():
    said = refused("build_release.sh", "--help")
    assert said == "error: expected a folder, got --help; this script has no flags\n"
