"""The hinge loss of SLiC. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term


def hinge(responses: ResponseSums, term: Term) -> np.ndarray:
    """max(0, 1 - beta h) (Zhao et al. 2023, equation 1, on log-ratios: Liu et al. 2023). h = 4, beta = 0.1: 0.6."""
    return np.maximum(0.0, 1.0 - term.beta * responses.gap(responses.ratios_S))
