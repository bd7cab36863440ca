"""The notebook runs from top to bottom in one process, with fewer steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.forked_programs import ROOT, run_python

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


def test_every_cell_runs(tmp_path):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert "steps = 60" in source and not any(cell["outputs"] for cell in cells)
    (tmp_path / "notebook.py").write_text(source.replace("steps = 60", "steps = 1"))
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
    }  # fmt: skip
    ran = run_python([str(tmp_path / "notebook.py")], environment, folder=tmp_path, timeout_seconds=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    for kind in ("sft", "reward", "ppo"):
        assert Path(tmp_path, "runs", kind, "model", "config.json").is_file()
