"""Threestep: supervised fine-tuning, a pairwise reward model and PPO on DeepSpeed.

Importing this package imports nothing heavy; each step and room is imported where it is used.
"""

import os
import sys

# As in threestep/__init__.py: the current folder, which `python -m` puts first, goes to the end.
if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    if os.path.realpath(sys.path[0]) != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
        sys.path.append(sys.path.pop(0))

# By default, libgomp's threads spin 300,000 times at a barrier: 20 times slower while other programs use the cores.
# torch's import reads it. 4,000 costs at most 5 % on idle cores (docs/lab_book/2026-q4-public-model.md).
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

__version__ = "0.1.0"
