"""The flags of step 1 that no other step has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.distillation.arguments import TeacherArguments, teacher_settings
from training.utils.distillation.settings import TeacherSettings, check_teacher
from training.utils.engine.config.arguments import RateArguments
from training.utils.flags.flags import flag, flag_of
from training.utils.mtp.arguments import MtpArguments
from training.utils.mtp.settings import MtpSettings, check_mtp

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags


@dataclass
class SftArguments:
    """Supervised fine-tuning."""

    topic: ClassVar[str] = "loss"

    learning_rate: float = flag_of(
        RateArguments, "Peak learning rate; the default is Alpaca's for full fine-tuning.", default=2e-5
    )
    neftune_alpha: float = flag(
        0.0,
        "NEFTune: add uniform noise of size alpha / sqrt(length x width) to the input embeddings in training; 0 "
        "adds none, the paper tries 5, 10 and 15 (Jain et al. 2023).",
        "number >= 0",
    )
    z_loss_coef: float = flag(
        0.0,
        "Weight of the z-loss, which keeps the logits' normalizer near 1; 0 leaves it out, PaLM uses 1e-4 "
        "(Chowdhery et al. 2022).",
        "factor >= 0",
    )
    likelihood_coef: float = flag(
        1.0,
        "Weight of the negative log-likelihood of the data's tokens; 0 trains by a teacher alone.",
        "factor >= 0",
    )
    teacher_model_name_or_path: str | None = flag_of(TeacherArguments)
    teacher_url: str | None = flag_of(TeacherArguments)
    distill: str | None = flag(
        None,
        "Distil from a file (JSON lines, or .parquet) of a teacher's likeliest tokens; with "
        "--teacher_model_name_or_path that model writes it first, if there is none yet.",
        "file",
        topic="teacher",
    )
    teacher_divergence: str = flag_of(TeacherArguments)
    teacher_beta: float = flag_of(TeacherArguments)
    teacher_top_k: int = flag_of(TeacherArguments)
    teacher_coef: float = flag_of(TeacherArguments)
    teacher_zero_stage: int | None = flag_of(TeacherArguments)
    teacher_offload: bool = flag_of(TeacherArguments)
    mtp_num_layers: int = flag_of(MtpArguments, topic="loss")
    mtp_loss_coef: float = flag_of(MtpArguments, topic="loss")
    mtp_final_norm: bool = flag_of(MtpArguments, topic="loss")
    mtp_detach: bool = flag_of(MtpArguments, topic="loss")

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_mtp(mistakes, self.mtp)
        check_teacher(mistakes, self.teacher)
        mistakes.require(
            self.likelihood_coef > 0 or self.teacher.is_there,
            "--likelihood_coef 0 leaves the model to a teacher, and there is none; give --teacher_model_name_or_path, "
            "or leave it out",
        )

    @property
    def teacher(self) -> TeacherSettings:
        return teacher_settings(self, file=self.distill)

    @property
    def mtp(self) -> MtpSettings:
        return MtpSettings(self.mtp_num_layers, self.mtp_loss_coef, self.mtp_final_norm, self.mtp_detach)


def check_flags(flags: OneModelFlags) -> None:
    """Raise ThreestepError if sequences with noise of their own are to share tokens, or a teacher is to read tags."""
    if flags.data.chat.parallel_thinking and flags.of_step.teacher.is_there:
        raise ThreestepError(
            f"--parallel_thinking lays out paths side by side, and {flags.of_step.teacher.flag} is of a teacher that "
            "was not trained on them; leave one of them out"
        )
    if flags.engine.share_beginnings and flags.of_step.neftune_alpha:
        raise ThreestepError(
            f"--share_beginnings {flags.engine.share_beginnings} computes a token once for several rows, and "
            f"--neftune_alpha {flags.of_step.neftune_alpha:g} gives each row noise of its own; leave one of them out"
        )
