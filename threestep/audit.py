"""Records of other trainers' steps, which `threestep audit` judges:

with threestep.audit.recorded(trainer, "record/"):
    trainer.train()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from threestep.apart import loaded_name

if TYPE_CHECKING:
    from training.audit.recorders import recorded

__all__ = ["recorded"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'threestep.audit' has no attribute '{name}'")
    return getattr(importlib.import_module(loaded_name("training.audit.recorders")), name)
