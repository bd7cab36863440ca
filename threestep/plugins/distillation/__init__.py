"""Distillation: a teacher whose next-token distributions the model in training is drawn to."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "distillation",
    "distillation from a teacher's distribution of each token",
    needs=("serving",),
    flags={
        "step1_sft": (f"{__name__}.arguments:SftTeacherArguments",),
        "step3_ppo": (f"{__name__}.arguments:TeacherArguments",),
    },
    tables={"advice": {"teacher_model_name_or_path": {"no_own_loss": "set --teacher_model_name_or_path"}}},
    topics={"teacher": "Distillation from a teacher"},
    hooks=Hooks(
        check=f"{__name__}.checks:check_beside_teacher",
        step_needs=f"{__name__}.checks:step_needs",
        guests=f"{__name__}.feature:teacher_of",
    ),
)
