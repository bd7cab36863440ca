"""The flags of a teacher, of steps that have them as a group. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from threestep.plugins.distillation.settings import DIVERGENCES, DivergenceSettings, TeacherSettings, check_teacher
from training.utils.flags.flags import flag, flag_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class TeacherArguments:
    """Distillation: a teacher whose distribution of the next token the model is drawn to."""

    topic: ClassVar[str] = "teacher"

    teacher_model_name_or_path: str | None = flag(
        None,
        "Distill from this model (a folder or hub name), which must have the student's tokenizer: compare its "
        "distribution for each response token with the student's (GKD, Agarwal et al. 2024).",
        "model",
    )
    teacher_url: str | None = flag(
        None,
        "Distill from the model served at this OpenAI-compatible URL, such as http://127.0.0.1:8000/v1, which must "
        "return prompt_logprobs as vLLM does; the API key is read from THREESTEP_API_KEY.",
        "address",
    )
    teacher_divergence: str = flag(
        DivergenceSettings.kind,
        "Divergence to minimize: reverse, KL(student, teacher); forward, KL(teacher, student); js, the generalized "
        "Jensen-Shannon divergence with --teacher_beta.",
        choices=DIVERGENCES,
    )
    teacher_beta: float = flag(
        DivergenceSettings.beta,
        "With js: the teacher's weight in the mixture that the teacher and the student are compared with (GKD's beta).",
        "0 < share < 1",
    )
    teacher_top_k: int = flag(
        DivergenceSettings.top_k,
        "Compare this many of the teacher's most likely tokens one by one, and all other tokens as one outcome, which "
        "gives a lower bound on the divergence; 0 compares the whole vocabulary.",
        "tokens >= 0",
    )
    teacher_coef: float = flag(
        TeacherSettings.coef, "Weight of the mean divergence per token in the loss.", "factor > 0"
    )
    teacher_zero_stage: int | None = flag(
        TeacherSettings.zero_stage,
        "ZeRO stage of the teacher: 3 shards its weights across the ranks; lower stages keep a full copy on each "
        "rank. Default: the student's stage.",
        "0 <= stage <= 3",
    )
    teacher_offload: bool = flag(
        TeacherSettings.offload, "With ZeRO-3: keep the teacher's weights in CPU memory.", topic="memory"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_teacher(mistakes, self.settings())

    def settings(self) -> TeacherSettings:
        return _settings(self)


@dataclass
class SftTeacherArguments:
    """The same in step 1, where a file may stand for the teacher."""

    topic: ClassVar[str] = "teacher"

    teacher_model_name_or_path: str | None = flag_of(TeacherArguments)
    teacher_url: str | None = flag_of(TeacherArguments)
    distill: str | None = flag(
        None,
        "Distill from a file (JSON lines or .parquet) of a teacher's most likely tokens. With "
        "--teacher_model_name_or_path, the file is first created from that model if it does not exist.",
        "file",
    )
    likelihood_coef: float = flag(
        1.0,
        "Weight of the negative log-likelihood of the data's tokens; 0 trains only on the teacher's distributions.",
        "factor >= 0",
        topic="loss",
    )
    teacher_divergence: str = flag_of(TeacherArguments)
    teacher_beta: float = flag_of(TeacherArguments)
    teacher_top_k: int = flag_of(TeacherArguments)
    teacher_coef: float = flag_of(TeacherArguments)
    teacher_zero_stage: int | None = flag_of(TeacherArguments)
    teacher_offload: bool = flag_of(TeacherArguments)

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        check_teacher(mistakes, self.settings())

    def settings(self) -> TeacherSettings:
        return _settings(self, self.distill)


def _settings(flags: TeacherArguments | SftTeacherArguments, file: str | None = None) -> TeacherSettings:
    compared = DivergenceSettings(flags.teacher_divergence, flags.teacher_beta, flags.teacher_top_k)
    named: Any = {name: getattr(flags, f"teacher_{name}") for name in ("url", "coef", "zero_stage", "offload")}
    return TeacherSettings(flags.teacher_model_name_or_path, file, compared=compared, **named)
