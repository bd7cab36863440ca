"""Flags that a loss or an estimator alone has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.step3_ppo.flags.test_arguments import mistakes_of
from threestep.plugins.objectives.checks import check
from training.step3_ppo.flags.arguments import AlgorithmArguments
from training.utils.base.errors import Mistakes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"otb_zero_tail": False, "advantage": "opo"},
            "--otb_zero_tail False is for --advantage optimal_token_baseline or tir_optimal_token_baseline, and it is "
            "opo; leave it out",
        ),
        ({"cov_share": 0.0, "policy_loss": "kl_cov"}, "--cov_share expects more than 0 and less than 1, got 0.0"),
        ({"cov_share": 0.1}, "--cov_share 0.1 is for --policy_loss kl_cov or clip_cov, and it is ppo; leave it out"),
        ({"sapo_tau_neg": 2.0}, "--sapo_tau_neg 2.0 is for --policy_loss sapo, and it is ppo; leave it out"),
        ({"sapo_tau_pos": 0.0, "policy_loss": "sapo"}, "--sapo_tau_pos expects more than 0, got 0.0"),
        (
            {"policy_loss": "sapo", "clip_range": 0.2},
            "--clip_range 0.2 does nothing with --policy_loss sapo; leave it out",
        ),
        (
            {"policy_loss": "geo_mean", "dual_clip": 3.0},
            "--dual_clip 3.0 does nothing with --policy_loss geo_mean; leave it out",
        ),
    ],
)
def test_flags_of_another_loss_or_estimator(given, sentence):
    assert mistakes_of(AlgorithmArguments(**given)) == [sentence]


def test_the_bounds_of_clip_cov():
    mistakes = Mistakes()
    check(SimpleNamespace(settings={"clip_cov_low": 6.0, "clip_cov_high": 5.0}), mistakes)
    assert mistakes.sentences == ["--clip_cov_low expects less than --clip_cov_high 5.0, got 6.0"]
    check(SimpleNamespace(settings={}), mistakes)
    check(SimpleNamespace(settings={"clip_cov_low": 1.0, "clip_cov_high": 5.0}), mistakes)
    assert len(mistakes.sentences) == 1
