"""A program of the project, and the most bytes that it held on the GPU.

    python -m benchmarks.gpu_day.watched MODULE FLAGS

Prints a line of JSON with `peak_bytes` at the end (0 without a GPU).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence

from training.utils.run.program import run_program


def main(argv: Sequence[str]) -> None:
    """Run and print."""
    importlib.import_module(argv[0]).main(list(argv[1:]))
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps({"peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    run_program(main)
