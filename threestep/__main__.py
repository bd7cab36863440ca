"""`python -m threestep sft ...`: the console command by Python's name, without the current folder on its path."""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    # A training.py where one works would stand for the package: `-m` puts the current folder first.
    # Nor is this folder on it, where a program is run by the folder: its modules are no modules of the user's.
    first = os.path.realpath(sys.path[0]) if sys.path else ""
    if first == os.path.realpath(os.path.dirname(__file__)) or (
        first == os.path.realpath(os.getcwd()) and ROOT in sys.path[1:]
    ):
        del sys.path[0]
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    from threestep.own_package import RUN, run_module

    if sys.argv[1:2] == [RUN]:
        run_module(sys.argv[2], sys.argv[3:])
    else:
        from threestep.command import main

        main()
