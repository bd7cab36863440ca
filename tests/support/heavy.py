"""What code imports, seen in a fresh Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def heavy_modules_after(code: str) -> tuple[list[str], float, str]:
    """Run `code` in a fresh Python; return the heavy packages it imported, its CPU seconds, its output."""
    tail = """
import resource, sys
heavy = ("torch", "numpy", "deepspeed", "datasets", "pyarrow", "pandas", "peft", "accelerate", "tensorboard", "vllm")
usage = resource.getrusage(resource.RUSAGE_SELF)
print("\\nHEAVY", usage.ru_utime + usage.ru_stime, *[name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    said, _, figures = done.stdout.rpartition("HEAVY ")
    seconds, *heavy = figures.split()
    return heavy, float(seconds), said
