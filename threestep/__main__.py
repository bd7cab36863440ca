"""`python -m threestep sft ...`: the console command by Python's name, without the current folder on its path."""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    # A training.py where one works would stand for the package: `-m` puts the current folder first.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()) and ROOT in sys.path[1:]:
        del sys.path[0]
    elif ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    from threestep.command import main

    main()
