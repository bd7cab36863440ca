"""One seed for a whole run: every random stream is named, and derived from it."""

from __future__ import annotations

import hashlib
import random


def derived_seed(seed: int, *names: object) -> int:
    """Return a 63-bit seed for the stream called `names`, e.g. derived_seed(1234, "rollout", step, row)."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch for this rank. Ranks differ, so that their dropout differs."""
    import numpy
    import torch

    value = derived_seed(seed, "process", rank)
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)
