"""Beta over the optimizer steps of a run."""

from __future__ import annotations

import math


def beta_at(step: float, total: float, first: float, last: float, *, cosine: bool = False) -> float:
    """From `first` in step 1 to `last` in step `total`, along a line or half a cosine. Step 2 of 3, 1 to 3: 2."""
    share = min(1.0, max(0.0, step - 1.0) / max(1.0, total - 1.0))
    return first + (last - first) * (0.5 - 0.5 * math.cos(math.pi * share) if cosine else share)
