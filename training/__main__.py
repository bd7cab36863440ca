"""Run a program of this package as `python -m` does, but without putting the current folder first on the path.

    python -m training training.step1_sft.main --config run.yaml
    python /path/to/training training.step1_sft.main --config run.yaml

The launcher starts its ranks with the second form, so that a `training.py` or a `datasets.py` in the current folder
replaces no installed module. (`python -P` does the same, from Python 3.11 on.)
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

PACKAGE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(PACKAGE)


def search_path(path: Sequence[str], here: str) -> list[str]:
    """Return Python's search path without its first entry for `-m` and for folders: the current folder, `here`, or
    this package. It begins with the folder that holds the package, unless that is on the path anyway."""
    first = os.path.realpath(path[0] or here) if path else ""
    rest = list(path[1:] if first in (os.path.realpath(here), os.path.realpath(PACKAGE)) else path)
    return rest if ROOT in rest else [ROOT, *rest]


def main(argv: Sequence[str]) -> None:
    """Run the module that is named first with the flags after it."""
    if not argv or argv[0].startswith("-"):
        sys.exit("error: no module given; pass one first, such as training.step1_sft.main")
    sys.path[:] = search_path(sys.path, os.getcwd())
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
