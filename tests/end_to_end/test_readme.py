"""README's start: the folders that it names are those of the quickstart, and its models answer as it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import ON_CPU
from tests.support.pages import ROOT, blocks
from threestep.plugins.embedded.task import check
from threestep.plugins.programs.all_steps import read_plan
from training.utils.flags.arguments import read_yaml

QUICKSTART = ROOT / "training" / "configs" / "quickstart.yaml"


def chat_line(text: str) -> list[str]:
    """The words of the last command of README's first block."""
    first = next(block.content for block in blocks(text) if block.language == "bash")
    return shlex.split(first.splitlines()[-1], comments=True)


def question_and_answer(text: str) -> tuple[str, str]:
    found = re.search(r"^Type `(.+)`: both answer `(.+)`\.$", text, re.MULTILINE)
    assert found is not None, "README says what to ask, and what is answered"
    return found[1], found[2]


def test_the_models_are_those_that_the_quickstart_leaves_and_the_answer_is_right():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    plan = read_plan(read_yaml(QUICKSTART), "quickstart.yaml")
    folders = [f"{settings['output_dir']}/model" for settings in plan.settings.values()]
    words = chat_line(text)
    assert words[:2] == ["threestep", "chat"] and words[2:4] == [folders[0], folders[-1]]
    question, answer = question_and_answer(text)
    assert check(f"Human: {question} Assistant:", f" {answer}") == 1.0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstarts_models_answer_as_it_says(tmp_path: Path):
    """The quickstart's settings from random weights, then the README's command with its question."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    question, answer = question_and_answer(text)
    environment = {**os.environ, **ON_CPU}
    start = [sys.executable, "-m", "threestep"]
    subprocess.run(
        [*start, "all", "--work_dir", str(tmp_path), "--config", str(QUICKSTART)], check=True, env=environment
    )
    done = subprocess.run(
        [*start, *chat_line(text)[1:]], input=question, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("== ")] == [answer] * 2, done.stdout
