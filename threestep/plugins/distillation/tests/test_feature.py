"""A teacher among the features of a run looks at its words and media before a model loads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.one_model_flags import one_model_flags
from threestep.plugins.distillation import opening
from threestep.plugins.distillation.arguments import SftTeacherArguments
from threestep.plugins.distillation.checks import check_beside_teacher, step_needs
from threestep.plugins.distillation.feature import TeacherFeature, teacher_of
from threestep.plugins.distillation.settings import TeacherSettings
from training.step1_sft import STEP
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.plugins.plugin import StepNeeds


def test_without_a_teacher_nothing_is_asked():
    none, mistakes = TeacherFeature(TeacherSettings()), Mistakes()
    none.check_words(object())
    none.check_media(mistakes)
    assert mistakes.sentences == [] and not none.trains_alone
    assert step_needs(one_model_flags(STEP, "")) == StepNeeds({}, "")


@pytest.mark.parametrize(
    ("in_rollouts", "why"),
    [
        (False, "--distill names a teacher that reads texts alone, and rows of the data have media; leave it out"),
        (True, "--distill does not go with prompts that have images: it is read on texts alone; leave it out"),
    ],
)
def test_a_teacher_reads_texts_alone(in_rollouts, why):
    teacher, mistakes = TeacherFeature(TeacherSettings(file="t.jsonl"), in_rollouts), Mistakes()
    teacher.check_media(mistakes)
    assert mistakes.sentences == [why]
    assert teacher.trains_alone
    needs = step_needs(one_model_flags(STEP, "--distill t.jsonl"))
    assert needs == StepNeeds({"--distill": True}, "a teacher is read with the forward that learns")


def test_words_are_compared_where_there_is_a_teacher(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(opening, "check_same_words", lambda *given: seen.append(given))
    settings, tokenizer = TeacherSettings("t"), object()
    TeacherFeature(settings).check_words(tokenizer)
    assert seen == [(settings, tokenizer)]


def test_a_teacher_of_step_1_reads_its_rows_and_no_paths():
    flags = one_model_flags(STEP, "--distill t.jsonl --parallel_thinking --max_seq_len 77 --padded true")
    assert flags.added.of(SftTeacherArguments).distill == "t.jsonl"
    assert teacher_of(flags).settings == TeacherSettings(file="t.jsonl", padded=True, longest_tokens=77)
    mistakes = Mistakes()
    check_beside_teacher(flags, mistakes)
    with pytest.raises(ThreestepError, match="--parallel_thinking lays out paths side by side, and --distill names a"):
        mistakes.raise_if_any()
