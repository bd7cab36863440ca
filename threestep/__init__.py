"""Threestep as one calls it: the console command `threestep`, and what Python imports. The work is done in `training`.

Importing this package imports nothing, not even `training`: `__main__` first sees to the path on which that is found.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training import __version__

__all__ = ["__version__"]

_HOMES = {"__version__": "training"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'threestep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
