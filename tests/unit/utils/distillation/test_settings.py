"""The flags of a teacher, together."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.distillation.settings import DivergenceSettings, TeacherSettings, check_teacher


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            TeacherSettings(top_k=5),
            "--teacher_top_k 5 is of a teacher, and there is none; give --teacher_model_name_or",
        ),
        (TeacherSettings(zero_stage=3), "--teacher_zero_stage 3 is of a teacher, and there is none"),
        (
            TeacherSettings("t", beta=0.1),
            "--teacher_beta 0.1 is of --teacher_divergence js, and that is reverse; leave",
        ),
    ],
)
def test_what_does_not_go_together(settings: TeacherSettings, why: str):
    mistakes = Mistakes()
    check_teacher(mistakes, settings)
    with pytest.raises(ThreestepError, match=why):
        mistakes.raise_if_any()


def test_a_teacher_and_none():
    mistakes = Mistakes()
    check_teacher(mistakes, TeacherSettings())
    check_teacher(mistakes, TeacherSettings("t", "js", 0.1, 5, 2.0, 3, offload=True))
    mistakes.raise_if_any()
    assert TeacherSettings("t", "js", 0.1, 5).compared_by == DivergenceSettings("js", 0.1, 5)
