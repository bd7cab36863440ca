"""Features that have guests, for runs of programs that tests launch."""

from __future__ import annotations

from training.utils.plugins.registry import plugin_module, plugins
from training.utils.setup.guests import GuestFeatures


def balancing(coefficient: float | None = None) -> GuestFeatures:
    """Return what mixtures of experts train with by default, or by another coefficient of their balancing loss."""
    if "routers" not in plugins():
        return GuestFeatures()
    return GuestFeatures([plugin_module("routers", "feature").RoutersFeature(coefficient)])
