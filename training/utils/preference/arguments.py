"""Flags that losses of pairs share. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.flags.flags import flag


@dataclass
class PairLossArguments:
    """Flags of a loss that compares a preferred response with another."""

    label_smoothing: float = flag(0.0, "Assumed share of pairs with swapped labels.", "0 <= share < 0.5")
