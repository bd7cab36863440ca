"""Flags of the losses that do not go together. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go together. flags: of a step."""
    low, high = (flags.settings.get(f"clip_cov_{side}") for side in ("low", "high"))
    mistakes.require(
        low is None or low < high, f"--clip_cov_low must be below --clip_cov_high {high}, got {low}; lower it"
    )
