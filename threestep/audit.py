"""Record the steps of other trainers for `threestep audit`, whose plugin is needed:

with threestep.audit.recorded(trainer, "record/"):
    trainer.train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    recorded: Any

__all__ = ["recorded"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'threestep.audit' has no attribute '{name}'")
    from training.utils.plugins.registry import plugin_module

    return getattr(plugin_module("audit", "recorders"), name)
