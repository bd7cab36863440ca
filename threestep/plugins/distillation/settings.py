"""Settings of a teacher, as one record. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

DIVERGENCES = REVERSE, FORWARD, JENSEN_SHANNON = "reverse", "forward", "js"
MODEL_FLAG, FILE_FLAG, URL_FLAG = "--teacher_model_name_or_path", "--distill", "--teacher_url"


@dataclass(frozen=True)
class DivergenceSettings:
    """kind: of DIVERGENCES (`divergence`). beta: of Jensen-Shannon, between 0 and 1. top_k: tokens that are compared
    one by one, the teacher's likeliest, and all others as one outcome; 0: the whole vocabulary."""

    kind: str = REVERSE
    beta: float = 0.5
    top_k: int = 0


@dataclass(frozen=True)
class TeacherSettings:
    """name_or_path: of a teacher in this process. file: of its likeliest tokens, which it writes if there is none yet.
    url: of a server. All three None: there is no teacher. coef: of its loss. zero_stage: None: the student's. offload:
    ZeRO-3: its weights are in CPU memory. padded, longest_tokens: of the rows that it will read."""

    name_or_path: str | None = None
    file: str | None = None
    url: str | None = None
    compared: DivergenceSettings = DivergenceSettings()
    coef: float = 1.0
    zero_stage: int | None = None
    offload: bool = False
    padded: bool = False
    longest_tokens: int = 0
    trust_remote_code: bool = False

    @property
    def is_there(self) -> bool:
        return self.name_or_path is not None or self.file is not None or self.url is not None

    @property
    def flag(self) -> str:
        """The flag that gives the teacher."""
        return MODEL_FLAG if self.name_or_path is not None else FILE_FLAG if self.file is not None else URL_FLAG


def check_teacher(mistakes: Mistakes, settings: TeacherSettings) -> None:
    """Note what is set of a teacher that is not there, and what does not go together."""
    compared, usual = settings.compared, TeacherSettings()
    for name, value, default in (
        ("divergence", compared.kind, usual.compared.kind),
        ("beta", compared.beta, usual.compared.beta),
        ("top_k", compared.top_k, usual.compared.top_k),
        ("coef", settings.coef, usual.coef),
        ("zero_stage", settings.zero_stage, usual.zero_stage),
        ("offload", settings.offload, usual.offload),
    ):
        mistakes.require(
            settings.is_there or value == default,
            f"--teacher_{name} {value} needs a teacher, but none is given; pass {MODEL_FLAG}, or remove "
            f"--teacher_{name}",
        )
    mistakes.require(
        compared.kind == JENSEN_SHANNON or compared.beta == DivergenceSettings.beta,
        f"--teacher_beta {compared.beta:g} applies only to --teacher_divergence {JENSEN_SHANNON}, but the divergence "
        f"is {compared.kind}; set --teacher_divergence {JENSEN_SHANNON}, or remove --teacher_beta",
    )
    mistakes.require(
        settings.url is None or (settings.name_or_path is None and settings.file is None),
        f"{URL_FLAG} {settings.url} names a server, but {MODEL_FLAG} or {FILE_FLAG} specifies another teacher; remove "
        "one of them",
    )
    mistakes.require(
        settings.url is None or compared.top_k > 0,
        f"{URL_FLAG} returns only a teacher's most likely tokens; set --teacher_top_k to at most what the server "
        "allows (often 20)",
    )
    mistakes.require(
        settings.file is None or settings.name_or_path is None or compared.top_k > 0,
        f"{FILE_FLAG} {settings.file} stores a teacher's most likely tokens; set --teacher_top_k, for example to 20",
    )
    mistakes.require(
        settings.file is None or settings.name_or_path is not None or compared.top_k == 0,
        f"--teacher_top_k {compared.top_k} is for a teacher that is loaded or served, but {FILE_FLAG} {settings.file} "
        "already fixes the number of tokens; remove --teacher_top_k",
    )
