"""The notebook runs from top to bottom in one process, and its model answers what it was trained to answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.forked_programs import ROOT, run_python

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
# What is behind the last cell here: its figures, and the answers of `threestep chat` to the same questions.
BEHIND = """
import contextlib, io, sys
from training.chat import main as chat

said = []
for digits in asked[:8]:
    sys.stdin, shown = io.StringIO(f"Largest of {digits}:\\n"), io.StringIO()
    with contextlib.redirect_stdout(shown):
        chat(["runs/ppo/model", "--temperature", "0", "--max_new_tokens", "4"])
    said.append(shown.getvalue().strip())
with open("figures.json", "w") as file:
    json.dump({"right": right, "asked": len(asked), "answers": answers, "said": said}, file)
"""


def test_every_cell_runs_and_the_answers_are_right(tmp_path):
    """50 of 60 where this was written; 2 of 60 where they are asked with "Human: ... Assistant:" around them."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    source = "\n\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "notebook.py").write_text(source + BEHIND)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
    }  # fmt: skip
    ran = run_python([str(tmp_path / "notebook.py")], environment, folder=tmp_path, timeout_seconds=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    for kind in ("sft", "reward", "ppo"):
        assert Path(tmp_path, "runs", kind, "model", "config.json").is_file()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["asked"] == 60 and figures["right"] >= 40, figures
    assert figures["said"] == [answer.strip() for answer in figures["answers"][:8]]
