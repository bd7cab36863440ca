"""Measured CPUs whose rates are the same at every size."""

from __future__ import annotations

from training.utils.clock.devices import HostCosts, Measured


def flat(rate: float, costs: HostCosts, *, optimizer: float = 1e8, head: float = 50.0, cached: float = 1e9) -> Measured:
    """rate: FLOP/s of products. optimizer: numbers a second; head, cached: bytes a second."""
    points = ((1.0, rate),)
    return Measured(((1.0, points),), costs, ((1.0, optimizer),), head, ((1.0, points),), cached)
