"""Settings of a teacher, as one record. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

DIVERGENCES = REVERSE, FORWARD, JENSEN_SHANNON = "reverse", "forward", "js"


@dataclass(frozen=True)
class DivergenceSettings:
    """kind: of DIVERGENCES (`divergence`). beta: of Jensen-Shannon, between 0 and 1. top_k: tokens that are compared
    one by one, the teacher's likeliest, and all others as one outcome; 0: the whole vocabulary."""

    kind: str = REVERSE
    beta: float = 0.5
    top_k: int = 0


@dataclass(frozen=True)
class TeacherSettings:
    """name_or_path: None: there is no teacher. divergence, beta, top_k: see `DivergenceSettings`. coef: of its loss.
    zero_stage: None: the student's. offload: ZeRO-3: its weights are in CPU memory. padded, longest_tokens: of the rows
    that it will read."""

    name_or_path: str | None = None
    divergence: str = DivergenceSettings.kind
    beta: float = DivergenceSettings.beta
    top_k: int = DivergenceSettings.top_k
    coef: float = 1.0
    zero_stage: int | None = None
    offload: bool = False
    padded: bool = False
    longest_tokens: int = 0
    trust_remote_code: bool = False

    @property
    def compared_by(self) -> DivergenceSettings:
        return DivergenceSettings(self.divergence, self.beta, self.top_k)


def check_teacher(mistakes: Mistakes, settings: TeacherSettings) -> None:
    """Note what is set of a teacher that is not there, and what does not go together."""
    for name in ("divergence", "beta", "top_k", "coef", "zero_stage", "offload"):
        value, usual = getattr(settings, name), getattr(TeacherSettings, name)
        mistakes.require(
            settings.name_or_path is not None or value == usual,
            f"--teacher_{name} {value} is of a teacher, and there is none; give --teacher_model_name_or_path or leave "
            "it out",
        )
    mistakes.require(
        settings.divergence == JENSEN_SHANNON or settings.beta == TeacherSettings.beta,
        f"--teacher_beta {settings.beta:g} is of --teacher_divergence {JENSEN_SHANNON}, and that is "
        f"{settings.divergence}; leave one of them out",
    )
