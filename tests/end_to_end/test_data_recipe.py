"""docs/data.md, "Bring your own dataset": its blocks are run in turn, as a reader would paste them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(language, file's name or "", content) of every block of a section."""
    text = (ROOT / "docs" / "data.md").read_text()
    _, _, rest = text.partition(f"\n## {section}\n")
    return BLOCK.findall(rest.partition("\n## ")[0])


def test_the_recipe_runs(tmp_path):
    python_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": python_first, "PYTHONPATH": str(ROOT)}
    outputs = []
    found = blocks("Bring your own dataset")
    assert [name for _, name, _ in found if name] == ["pairs.jsonl", "check.py", "my_dataset.py"]
    for language, name, content in found:
        if name:
            (tmp_path / name).write_text(content)
            continue
        assert language == "bash"
        done = subprocess.run(["bash", "-ec", content], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, content + done.stdout + done.stderr
        outputs.append(done.stdout)

    _, by_flags, by_class, _ = outputs
    for output in (by_flags, by_class):
        kept = re.findall(r"^phase (\d): train: (\d) rows", output, re.MULTILINE)
        assert kept == [("1", "2"), ("2", "1"), ("3", "1")]
    assert "asks: 'Human: " in by_flags and "reference: None" in by_flags
    assert "asks: 'Human: (" in by_class and re.search(r"reference: [^N]", by_class)
    assert (tmp_path / "sft" / "model" / "config.json").is_file()
