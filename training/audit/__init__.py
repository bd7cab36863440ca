"""The audit of a training step: what a record says was computed, recomputed from the parts before it.

The program is `python -m training.audit`; docs/audit.md describes records and what is judged. `recorded` writes records
of TRL's trainers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["recorded"]


def __getattr__(name: str) -> Any:
    if name != "recorded":
        raise AttributeError(f"module 'training.audit' has no attribute '{name}'")
    from training.audit.recorders import recorded

    return recorded
