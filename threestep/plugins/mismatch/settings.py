"""Settings of the correction, and the spelling of a rejection. Serves the flags and the maths of the room."""

from __future__ import annotations

from dataclasses import dataclass

from threestep.plugins.mismatch.recipes import REJECTIONS
from training.utils.base.errors import ThreestepError


@dataclass(frozen=True)
class Rejection:
    """kind: SCOPE_ESTIMATE, an entry of REJECTIONS. Accepted: for k1, a ratio from lower to upper; for k2 and k3,
    which are 0 at the least, a value of at most `upper` (lower is None)."""

    kind: str
    lower: float | None
    upper: float

    @property
    def scope(self) -> str:
        return self.kind.rsplit("_", 1)[0]

    @property
    def estimate(self) -> str:
        return self.kind.rsplit("_", 1)[1]


@dataclass(frozen=True)
class MismatchSettings:
    """See the flags of the same names.

    threshold_lower: None is 1 / threshold for "mask", and no lower bound for "truncate".
    veto: smallest ratio of a token whose response is accepted; None accepts all.
    rejected: "stay" leaves rejected tokens in the loss's denominators, "leave" takes them out.
    bypass: the rollout's log-probabilities are the old ones; weights and rejection are then the loss's, from the
        policy of each update.
    """

    correction: str
    level: str = "token"
    threshold: float = 2.0
    threshold_lower: float | None = None
    normalize: bool = False
    veto: float | None = None
    rejection: tuple[Rejection, ...] = ()
    rejected: str = "stay"
    bypass: bool = False

    @property
    def rejects(self) -> bool:
        return bool(self.rejection) or self.veto is not None

    @property
    def acts(self) -> bool:
        """True if anything is corrected."""
        return self.correction != "none" or self.rejects or self.bypass

    @property
    def least(self) -> float:
        """The lower bound that figures count by, and that "mask" cuts at."""
        return 1.0 / self.threshold if self.threshold_lower is None else self.threshold_lower


def rejection_of(given: str) -> Rejection:
    """Read KIND:UPPER or KIND:LOWER:UPPER. k1's lower bound is 1 / UPPER where it is not given.

    ThreestepError: an unknown kind, bounds that are no numbers, keep nothing, or that the kind does not have.
    """
    kind, *bounds = given.split(":")
    form = "KIND:UPPER or, for k1, KIND:LOWER:UPPER, such as seq_mean_k1:0.999:1.001 or token_k3:0.01"
    if kind not in REJECTIONS:
        raise ThreestepError(
            f"--mismatch_rejection expects {form}, where KIND is one of {', '.join(REJECTIONS)}, got '{given}'; "
            "choose one of these"
        )
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        numbers = []
    is_ratio = kind.endswith("k1")
    fits = (
        len(numbers) in ((1, 2) if is_ratio else (1,))
        and all(number > 0 for number in numbers)
        and (not is_ratio or numbers[-1] >= 1.0 >= (numbers[0] if len(numbers) == 2 else 0.0))
    )
    if not fits:
        of_kind = "a ratio range around 1 with UPPER at least 1" if is_ratio else "one value above 0"
        raise ThreestepError(
            f"--mismatch_rejection expects {form}, and {kind} needs {of_kind}, got '{given}'; change the bounds"
        )
    if not is_ratio:
        return Rejection(kind, None, numbers[0])
    return Rejection(kind, numbers[0] if len(numbers) == 2 else 1.0 / numbers[0], numbers[-1])
