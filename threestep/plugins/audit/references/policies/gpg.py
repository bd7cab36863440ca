"""The policy gradient itself. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def gpg(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """-A log p (Williams 1992; Chu et al. 2025). A = 2, log p = -1: 2."""
    return -tokens.advantage_T * tokens.new_T
