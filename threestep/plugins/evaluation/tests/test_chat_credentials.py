"""A secret in a flag of the chat is in no message and in no file."""

from __future__ import annotations

from tests.unit.utils.base.test_credentials import check_flags_of_text
from threestep.plugins.evaluation import chat
from training.utils.base import credentials


def test_a_secret_in_any_flag_of_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(credentials, "_hidden", set())
    check_flags_of_text(chat.GROUPS, None, tmp_path, capsys)
