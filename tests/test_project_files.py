"""What a project has beside its code: the container file, the Makefile, issue templates, versions, the changelog."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from threestep.command import commands

ROOT = Path(__file__).parents[1]
KNOWN = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}


def instructions():
    """(instruction, the rest) of each in the Containerfile, with lines joined as its readers join them."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def test_the_container_file_is_made_of_instructions_and_what_it_copies_is_here():
    found = instructions()
    assert {name for name, _ in found} <= KNOWN
    assert [name for name, _ in found][:3] == ["ARG", "FROM", "ARG"]  # an ARG before FROM holds for FROM alone
    declared = {rest.split("=")[0] for name, rest in found if name == "ARG"}
    assert set(re.findall(r"\$\{?(DEVICE|BASE)\b", (ROOT / "Containerfile").read_text())) == declared
    for name, rest in found:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(yaml.safe_load(rest), list)  # the form without a shell
    assert dict(found)["ENTRYPOINT"] == '["threestep"]'


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


def test_the_base_of_the_container_has_a_digest():
    (base,) = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"BASE=docker\.io/library/python:3\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


def test_the_examples_at_its_top_name_commands():
    words = re.findall(r"threestep:\w+ ([\w-]+)", (ROOT / "Containerfile").read_text())
    assert words and set(words) <= set(commands())


def test_every_make_target_is_said_at_the_top_and_runs_a_script_that_is_here():
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", text, re.MULTILINE)
    said = re.findall(r"\bmake (\w+)", text.split("\n\n")[0])
    assert sorted(said) == sorted(targets)
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split()
    assert sorted(phony) == sorted(targets)
    scripts = re.findall(r"scripts/\w+\.sh", text)
    assert len(scripts) > 5 and all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in ("textarea", "input", "dropdown", "checkboxes") for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_page_of_versions_says_what_setup_and_the_pins_say():
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| (\w+)[^|]* \| ([\d.]+ \| [\d.]+) \|$", text, re.MULTILINE))
    setup, pins = ((ROOT / name).read_text() for name in ("setup.py", "constraints.txt"))
    assert rows["Python"].split(" | ")[0] == re.search(r'python_requires=">=([\d.]+)"', setup)[1]
    for name in ("torch", "transformers", "DeepSpeed"):
        oldest, tested = rows[name].split(" | ")
        required = Requirement(re.search(rf'"({name.lower()}[>=].*?)"', setup)[1])
        assert str(required.specifier) == f">={oldest}"
        assert re.search(rf"^{name.lower()}=={re.escape(tested)}$", pins, re.MULTILINE)


def test_the_changelog_has_the_usual_form():
    """keepachangelog.com: Unreleased first, then versions with dates; known kinds of change, once each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", part, re.MULTILINE)
        order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        assert kinds == [kind for kind in order if kind in kinds]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(("message", "code"), [("x" * 72 + "\n\n" + "y" * 99, 0), ("x" * 73 + "\n", 1)])
def test_the_subject_of_a_commit_is_short(message, code, tmp_path):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entry = next(hook["entry"] for hook in hooks if hook["id"] == "commit-subject")
    (tmp_path / "message").write_text(message)
    done = subprocess.run([*shlex.split(entry), tmp_path / "message"], capture_output=True, text=True)
    assert done.returncode == code
    assert ("the subject has 73 characters, at most 72: xxx" in done.stderr) == bool(code)
