"""Checks of a teacher beside a step's other flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.arguments import SftTeacherArguments
from threestep.plugins.distillation.feature import teacher_of
from threestep.plugins.distillation.settings import MODEL_FLAG, URL_FLAG
from training.utils.plugins.plugin import StepNeeds
from training.utils.setup.flags import OneModelFlags

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check_beside_teacher(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go with a teacher."""
    teacher = teacher_of(flags).settings
    if not teacher.is_there:
        mistakes.require(
            flags.added.of(SftTeacherArguments).likelihood_coef > 0,
            "--likelihood_coef 0 trains only on a teacher's distributions, but no teacher is given; pass "
            f"{MODEL_FLAG}, or remove --likelihood_coef",
        )
        return
    if not isinstance(flags, OneModelFlags):
        _check_rollouts(flags, mistakes)
        return
    mistakes.require(
        flags.data.form is None,
        f"--parallel_thinking lays out paths side by side, but the teacher of {teacher.flag} was not trained on such "
        "paths; remove one of the flags",
    )


def step_needs(flags: Any) -> StepNeeds:
    """The needs of a teacher (`Hooks.step_needs`)."""
    teacher = teacher_of(flags).settings
    if not teacher.is_there:
        return StepNeeds()
    return StepNeeds({teacher.flag: True}, "the teacher is read in the training forward pass")


def _check_rollouts(flags: Any, mistakes: Mistakes) -> None:
    """flags: `PpoFlags`, with a teacher."""
    teacher, algorithm = teacher_of(flags).settings, flags.algorithm
    mistakes.require(
        teacher.url is None or flags.ppo.temperature == 1.0,
        f"{URL_FLAG} returns probabilities at temperature 1, but --temperature is {flags.ppo.temperature:g}; set it "
        f"to 1, or use {MODEL_FLAG}",
    )
    others = {
        "--mask_truncated_responses": (
            algorithm.mask_truncated_responses,
            "leaves responses out of the loss, but a teacher is compared on every generated token",
        ),
        "--parallel_thinking": (flags.data.form is not None, "inserts tags that the teacher was not trained on"),
    }
    for name, (given, why) in others.items():
        mistakes.require(not given, f"{name} {why}; remove it or {teacher.flag}")
