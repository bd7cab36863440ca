"""The flags of a head as a group."""

from __future__ import annotations

from training.utils.mtp.arguments import MtpArguments
from training.utils.mtp.settings import MtpSettings


def test_the_defaults_train_no_head():
    assert MtpArguments().settings() == MtpSettings()
    assert MtpSettings().layers == 0


def test_the_flags_become_settings():
    assert MtpArguments(2, 0.3).settings() == MtpSettings(2, 0.3)
