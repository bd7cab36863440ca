"""Control of the KL's coefficient. Pure numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST_ERROR = 0.2  # Ziegler et al. 2019, section 2.2: the relative error is cut to +- this


@dataclass
class KlControl:
    """Constant without a target; with one, moves kl_coef to hold the KL of a response near it.

    kl_coef <- kl_coef (1 + clip(KL / target - 1, +- 0.2) n / horizon) after n responses whose mean KL, summed over
    their tokens, is KL nats (Ziegler et al. 2019, section 2.2; n / horizon is their K_beta as lm-human-preferences has
    it).
    """

    kl_coef: float
    target: float | None = None
    horizon: float = math.inf

    def slow_warning(self, sequences: int) -> str | None:
        """Return a sentence if kl_coef cannot double over so many responses; None if it can, or is fixed."""
        most = math.exp(_LARGEST_ERROR * sequences / self.horizon)
        if self.target is None or most >= 2.0:
            return None
        return (
            f"warning: --kl_control adaptive can raise --kl_coef by {most - 1.0:.1%} at most over the {sequences:,} "
            f"responses of this run: --kl_horizon {self.horizon:g} is long beside them, and the KL may stay off its "
            "target; a horizon of a tenth of the run's responses follows it"
        )

    def update(self, kl: float, sequences: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.kl_coef *= 1.0 + error * sequences / self.horizon
