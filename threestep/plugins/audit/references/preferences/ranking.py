"""The loss of a reward model. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.audit.references.preferences.responses import smoothed

if TYPE_CHECKING:
    import numpy as np


def ranking_loss(
    chosen_P: np.ndarray, rejected_P: np.ndarray, margin_P: np.ndarray, *, smoothing: float = 0.0, centring: float = 0.0
) -> np.ndarray:
    """-log sigmoid(r_w - r_l - m): Ouyang et al. 2022, equation 1; m: Touvron et al. 2023, equation 2.
    centring: times (r_w + r_l)^2 (Eisenstein et al. 2023, section 2).

    Worked example, scores 1 and 1, no margin: log 2.
    """
    return smoothed(chosen_P - rejected_P - margin_P, smoothing) + centring * (chosen_P + rejected_P) ** 2
