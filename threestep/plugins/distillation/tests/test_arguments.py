"""Flags of a teacher become its settings, in step 3 and in step 1."""

from __future__ import annotations

from dataclasses import fields

from threestep.plugins.distillation.arguments import SftTeacherArguments, TeacherArguments
from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings


def test_settings_of_flags():
    flags = TeacherArguments("t", None, "js", 0.2, 7, 0.5, 3, teacher_offload=True)
    compared = DivergenceSettings("js", 0.2, 7)
    assert flags.settings() == TeacherSettings("t", None, None, compared, 0.5, 3, offload=True)
    assert TeacherArguments().settings() == TeacherSettings() == SftTeacherArguments().settings()
    assert SftTeacherArguments(distill="f.jsonl").settings() == TeacherSettings(file="f.jsonl")


def test_step_1_has_every_flag():
    own = {field.name for field in fields(SftTeacherArguments)}
    assert {field.name for field in fields(TeacherArguments)} <= own
