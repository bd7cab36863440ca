"""Measured CPUs whose rates are the same at every size."""

from __future__ import annotations

from typing import Any

from threestep.plugins.plan.clock.devices import HostCosts, Measured


def flat(rate: float, costs: HostCosts, *, optimizer: float = 1e8, head: float = 50.0, cached: float = 1e9) -> Measured:
    """rate: FLOP/s of products. optimizer: numbers a second; head, cached: bytes a second; 1e12 of other operators."""
    points, memory = ((1.0, rate),), ((1.0, 1e12),)
    return Measured(((1.0, points),), costs, ((1.0, optimizer),), head, ((1.0, points),), cached, (memory, memory))


def host_costs(forward: float, backward: float, *others: float, **named: Any) -> HostCosts:
    """forward, backward: seconds of an operator, whatever its bytes."""
    return HostCosts(((1.0, forward),), ((1.0, backward),), *others, **named)
