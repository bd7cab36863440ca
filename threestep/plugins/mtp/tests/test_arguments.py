"""The flags of a head as a group."""

from __future__ import annotations

import pytest

from threestep.plugins.mtp.arguments import MtpArguments
from threestep.plugins.mtp.settings import MtpSettings
from training.utils.base.errors import Mistakes, ThreestepError


def test_the_defaults_train_no_head():
    assert MtpArguments().settings() == MtpSettings()
    assert MtpSettings().layers == 0


def test_the_flags_become_settings():
    assert MtpArguments(2, 0.3).settings() == MtpSettings(2, 0.3)


def test_a_step_that_trains_by_rewards_takes_no_loss_of_the_head():
    mistakes = Mistakes()
    MtpArguments(1, mtp_detach=False).validate(mistakes)
    with pytest.raises(ThreestepError, match="--mtp_detach false trains the model by the head's loss too, and this"):
        mistakes.raise_if_any()
