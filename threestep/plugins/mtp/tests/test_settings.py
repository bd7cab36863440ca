"""The flags of a head."""

from __future__ import annotations

import pytest

from threestep.plugins.mtp.settings import MtpSettings, check_mtp
from training.utils.base.errors import Mistakes, ThreestepError


def test_a_weight_without_a_head_is_a_mistake():
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(0, 0.3))
    with pytest.raises(ThreestepError, match="--mtp_loss_coef 0.3 weighs the loss of a head, and there is none"):
        mistakes.raise_if_any()


def test_a_form_without_a_head_is_a_mistake():
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(0, final_norm=False))
    with pytest.raises(ThreestepError, match="--mtp_final_norm false is for a head, and there is none"):
        mistakes.raise_if_any()


def test_defaults_and_a_head_are_none():
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(0, 0.1))
    check_mtp(mistakes, MtpSettings(1, 0.3, final_norm=False))
    mistakes.raise_if_any()


def test_one_loss_for_both_needs_a_head():
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(0, detach=False))
    with pytest.raises(ThreestepError, match="--mtp_detach false is for a head, and there is none; give --mtp_num_lay"):
        mistakes.raise_if_any()
