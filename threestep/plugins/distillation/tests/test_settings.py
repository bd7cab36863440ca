"""The flags of a teacher, together."""

from __future__ import annotations

import pytest

from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings, check_teacher
from training.utils.base.errors import Mistakes, ThreestepError

TOP = DivergenceSettings("js", 0.1, 5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            TeacherSettings(compared=DivergenceSettings(top_k=5)),
            "--teacher_top_k 5 is for a teacher, and there is none",
        ),
        (TeacherSettings(zero_stage=3), "--teacher_zero_stage 3 is for a teacher, and there is none; give"),
        (TeacherSettings("t", compared=DivergenceSettings(beta=0.1)), "--teacher_beta 0.1 is for --teacher_divergence"),
        (TeacherSettings(url="http://a/v1"), "--teacher_url gives a teacher's likeliest tokens alone; give"),
        (TeacherSettings("t", url="http://a/v1"), "--teacher_url http://a/v1 asks a server, and"),
        (TeacherSettings("t", "f.jsonl"), "--distill f.jsonl takes a teacher's likeliest tokens; give --teacher_top_k"),
        (TeacherSettings(file="f.jsonl", compared=TOP), "--teacher_top_k 5 is for a teacher that is read, and"),
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
    check_teacher(mistakes, TeacherSettings("t", "f.parquet", None, TOP, 2.0, 3, offload=True))
    check_teacher(mistakes, TeacherSettings(file="f.jsonl"))
    check_teacher(mistakes, TeacherSettings(url="http://a/v1", compared=TOP))
    mistakes.raise_if_any()
    given = (TeacherSettings("t"), TeacherSettings(file="f"), TeacherSettings(url="u"))
    assert [each.flag for each in given] == ["--teacher_model_name_or_path", "--distill", "--teacher_url"]
    assert all(each.is_there for each in given) and not TeacherSettings().is_there
