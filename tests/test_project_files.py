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

ROOT = Path(__file__).parents[1]


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
    text = (ROOT / "docs" / "versions.md").read_text()
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
