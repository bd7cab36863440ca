"""Settings of guests look at a run's words and media before a model loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.distillation import opening
from training.utils.distillation.settings import TeacherSettings
from training.utils.setup.guests import GuestSettings


def test_a_teacher_reads_texts_alone():
    media: Any = SimpleNamespace(name="images")
    assert GuestSettings().checked_media(media) is media
    beside = GuestSettings(teacher=TeacherSettings("t"))
    assert beside.checked_media(None) is None
    with pytest.raises(
        ThreestepError, match="--teacher_model_name_or_path is of a teacher that reads texts alone, and r"
    ):
        beside.checked_media(media)


def test_words_are_compared_where_there_is_a_teacher(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(opening, "check_same_words", lambda *given: seen.append(given))
    tokenizer: Any = object()
    GuestSettings().check_words(tokenizer)
    settings = TeacherSettings("t")
    GuestSettings(teacher=settings).check_words(tokenizer)
    assert seen == [(settings, tokenizer)]
