"""The words of --as."""

from __future__ import annotations

import pytest

from threestep.plugins.audit.words import settings_of_words
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def test_words_and_values():
    assert settings_of_words("grpo, token mean, k3") == {
        "advantage": "grpo", "reduction": "token mean", "kl_estimator": "k3",
    }  # fmt: skip
    assert settings_of_words("GAE, KL in loss, ddof 0, whitened, no std, beta=0.1, whiten=false,") == {
        "advantage": "gae", "kl_in": "loss", "std_ddof": 0.0, "whiten": False, "norm_by": "none", "beta": 0.1,
    }  # fmt: skip
    assert settings_of_words("") == {}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("grop", "got 'grop'; did you mean 'grpo'"),
        ("beta", "got 'beta'"),
        ("bet=1", "got 'bet=1'; did you mean 'beta='"),
        ("beta=much", "--as: beta expects a number, got 'much'"),
        ("kl_in=nowhere", "--as: kl_in expects one of reward, loss, none, got 'nowhere'"),
        ("whiten=2", "--as: whiten expects true or false, got '2'"),
    ],
)
def test_other_words_are_refused(said, words):
    with pytest.raises(ThreestepError) as refusal:
        settings_of_words(said)
    assert words in str(refusal.value)
