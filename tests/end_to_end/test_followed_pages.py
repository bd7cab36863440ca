"""Pages as a reader follows them. README's start: the folders that it names are those of the quickstart, and its models
answer as it says. docs/data.md: its blocks are run in turn, as one would paste them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import ON_CPU, may_fork, run_python
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
    found = re.search(r"^Type `(.+)`\. Both models answer `(.+)`\.$", text, re.MULTILINE)
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


# A shell that leaves in a file what its one command `python ...` or `threestep ...` is called with.
KEPT = 'python() { test ! -e words; printf "%s\\0" "$@" > words; }\nthreestep() { python -m threestep "$@"; }\n'


def pasted(content: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block by bash in `folder`, its program as a fork where that may be."""
    python_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": python_first, "PYTHONPATH": str(ROOT)}
    forks = may_fork(env)
    shell = ["bash", "-ec", KEPT + content if forks else content]
    done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True)
    if not forks or done.returncode != 0:
        return done
    words = (folder / "words").read_text().split("\0")[:-1]
    (folder / "words").unlink()
    return run_python(words, env, folder=folder)


def test_the_page_of_data_runs(tmp_path):
    outputs = []
    page = (ROOT / "docs" / "data.md").read_text()
    found = [each[:3] for each in blocks(page) if each.language or each.label]  # without what was printed
    assert [name for _, name, _ in found if name] == ["pairs.jsonl", "my_dataset.py"]
    for language, name, content in found:
        if name:
            (tmp_path / name).write_text(content)
            continue
        assert language == "bash"
        done = pasted(content, tmp_path)
        assert done.returncode == 0, content + done.stdout + done.stderr
        outputs.append(done.stdout)

    by_flags, _, by_class, *steps = outputs
    for output in (by_flags, by_class):
        assert "Human: " in output and "  3 kept, " in output and "dropped 1 (no_rejected)" in output
    assert output.count("  4 kept, ") == 2 and "Human: (sums)" in output and "reference: 5." in output
    for step, log in zip(("sft", "reward", "ppo"), steps, strict=True):
        assert (tmp_path / step / "model" / "config.json").is_file() and "read from the cache" not in log
    sft = next(content for _, _, content in found if content.startswith("threestep sft"))
    again = pasted(sft.replace("--output_dir sft", "--output_dir again"), tmp_path)
    assert "data: step 1 rows read from the cache" in again.stdout
