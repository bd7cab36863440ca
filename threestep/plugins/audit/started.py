"""Programs that a rank starts."""

from __future__ import annotations

from collections.abc import Mapping

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def outside_of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that a rank starts, which is none of the ranks."""
    return {name: value for name, value in environment.items() if name not in _OF_A_RANK}
