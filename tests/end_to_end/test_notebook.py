"""The notebooks run from top to bottom, each in one process, with fewer steps; they are stored without outputs."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

from tests.support.forked_programs import ON_CPU, ROOT, run_python

# What is behind the last cell here: its figures, and the answers of `threestep chat` to the same questions.
BEHIND = """
import contextlib, io, json, sys
from threestep.plugins.evaluation.chat import main as chat

said = []
for digits in asked[:8]:
    sys.stdin, shown = io.StringIO(f"Largest of {digits}:\\n"), io.StringIO()
    with contextlib.redirect_stdout(shown):
        chat(["runs/grpo/model", "--temperature", "0", "--max_new_tokens", "4"])
    said.append(shown.getvalue().strip())
with open("figures.json", "w") as file:
    json.dump({"right": right, "asked": len(asked), "answers": answers, "said": said}, file)
"""
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_cells(name: str) -> list[dict]:
    cells = json.loads((ROOT / "examples" / name).read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def ran(name: str, folder: Path, behind: str = "", **changed: str) -> str:
    """What the notebook's cells print as one program, with these assignments changed and `behind` after the last."""
    source = "\n\n".join("".join(cell["source"]) for cell in code_cells(name))
    for variable, value in changed.items():
        source, found = re.subn(rf"^{variable} = [^#\n]+", f"{variable} = {value}  ", source, flags=re.MULTILINE)
        assert found == 1, variable
    (folder / "notebook.py").write_text(source + behind)
    environment = {**os.environ, **ON_CPU, "HOME": str(folder)}
    done = run_python([str(folder / "notebook.py")], environment, folder=folder, timeout_seconds=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in code_cells(path.name):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        ast.parse("".join(cell["source"]))  # no line of the shell, which a program could not run


def test_the_first_hour_ends_with_answers_that_are_right(tmp_path):
    """50 of 60 where this was written; 2 of 60 where they are asked with "Human: ... Assistant:" around them."""
    ran("first_hour.ipynb", tmp_path, behind=BEHIND)
    for kind in ("sft", "reward", "grpo"):
        assert (tmp_path / "runs" / kind / "model" / "config.json").is_file()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["asked"] == 60 and figures["right"] >= 40, figures
    assert figures["said"] == [answer.strip() for answer in figures["answers"][:8]]


def test_the_first_day_on_a_gpu_ends_with_a_text_for_an_issue(tmp_path):
    """In a checkout, which the cell finds from a folder in it."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "training").symlink_to(ROOT / "training")
    printed = ran("gpu_day.ipynb", tmp_path, parts="[4]", minutes="2", only='["generate"]', tiny="True")
    assert "No GPU: all parts run on tiny shapes" in printed
    told, text = printed.split("ended with 0\n")
    assert "part 4: " in told and ": measured\n" in told
    assert text.startswith("<details><summary>threestep ") and text.rstrip().endswith("</details>")
    assert "# Part 4: Decoding" in text and "| generate, batch 3 | " in text
    assert "not asked for" not in text and str(tmp_path) not in text
