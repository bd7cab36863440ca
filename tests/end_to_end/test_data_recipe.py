"""docs/data.md, "Bring your own dataset": its blocks are run in turn, as a reader would paste them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.forked_programs import may_fork, run_python

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A shell that leaves in a file what its one command `python ...` or `threestep ...` is called with.
KEPT = 'python() { test ! -e words; printf "%s\\0" "$@" > words; }\nthreestep() { python -m threestep "$@"; }\n'


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(language, file's name or "", content) of every block of a section."""
    text = (ROOT / "docs" / "data.md").read_text()
    _, _, rest = text.partition(f"\n## {section}\n")
    return BLOCK.findall(rest.partition("\n## ")[0])


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


def test_the_recipe_runs(tmp_path):
    outputs = []
    found = blocks("Bring your own dataset")
    assert [name for _, name, _ in found if name] == ["pairs.jsonl", "check.py", "my_dataset.py"]
    for language, name, content in found:
        if name:
            (tmp_path / name).write_text(content)
            continue
        assert language == "bash"
        done = pasted(content, tmp_path)
        assert done.returncode == 0, content + done.stdout + done.stderr
        outputs.append(done.stdout)

    _, by_flags, by_class, *steps = outputs
    for output in (by_flags, by_class):
        kept = re.findall(r"^phase (\d): train: (\d) rows", output, re.MULTILINE)
        assert kept == [("1", "2"), ("2", "1"), ("3", "1")]
    assert "asks: 'Human: " in by_flags and "reference: None" in by_flags
    assert "asks: 'Human: (" in by_class and re.search(r"reference: [^N]", by_class)
    for step, log in zip(("sft", "reward", "ppo"), steps, strict=True):
        assert (tmp_path / step / "model" / "config.json").is_file() and "read from the cache" not in log
    sft = next(content for _, _, content in found if content.startswith("threestep sft"))
    again = pasted(sft.replace("--output_dir sft", "--output_dir again"), tmp_path)
    assert "data: phase1 read from the cache" in again.stdout
