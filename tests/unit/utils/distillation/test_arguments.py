"""Flags of a teacher become its settings, in step 3 and in step 1."""

from __future__ import annotations

from dataclasses import fields

from training.step1_sft.arguments import SftArguments
from training.utils.distillation.arguments import TeacherArguments, teacher_settings
from training.utils.distillation.settings import DivergenceSettings, TeacherSettings


def test_settings_of_flags():
    flags = TeacherArguments("t", None, "js", 0.2, 7, 0.5, 3, teacher_offload=True)
    compared = DivergenceSettings("js", 0.2, 7)
    expected = TeacherSettings("t", None, None, compared, 0.5, 3, offload=True, padded=True, longest_tokens=9)
    assert teacher_settings(flags, padded=True, longest_tokens=9) == expected
    assert teacher_settings(TeacherArguments()) == TeacherSettings() == SftArguments().teacher
    assert SftArguments(distill="f.jsonl").teacher == TeacherSettings(file="f.jsonl")


def test_step_1_has_every_flag():
    own = {field.name for field in fields(SftArguments)}
    assert {field.name for field in fields(TeacherArguments)} <= own
