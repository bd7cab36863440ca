"""The flags of the algorithm, checked before anything loads."""

from __future__ import annotations

import pytest

from training.step3_ppo.flags.arguments import AlgorithmArguments
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes


def mistakes_of(arguments: AlgorithmArguments) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound():
    assert mistakes_of(AlgorithmArguments()) == []


@pytest.mark.needs_plugin("objectives")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gamma": 1.5}, "--gamma expects a number from 0 to 1, got 1.5"),
        ({"lam": -0.1}, "--lam expects a number from 0 to 1, got -0.1"),
        ({"clip_range": 0.0}, "--clip_range expects more than 0, got 0.0"),
        ({"clip_range_low": 0.0}, "--clip_range_low expects more than 0, got 0.0"),
        ({"clip_range_high": -1.0}, "--clip_range_high expects more than 0, got -1.0"),
        ({"clip_range_value": 0.0}, "--clip_range_value expects more than 0, got 0.0"),
        ({"kl_target": 0.0}, "--kl_target expects more than 0, got 0.0"),
        ({"kl_horizon": 0.0}, "--kl_horizon expects more than 0, got 0.0"),
        ({"dual_clip": 1.0}, "--dual_clip expects more than 1, got 1.0"),
        ({"kl_coef": -0.1}, "--kl_coef expects 0 or more, got -0.1"),
        ({"entropy_coef": -0.1}, "--entropy_coef expects 0 or more, got -0.1"),
        ({"critic_warmup": -1}, "--critic_warmup expects 0 or more, got -1"),
        ({"dynamic_sampling_tries": -1}, "--dynamic_sampling_tries expects 0 or more, got -1"),
        ({"missing_eos_penalty": -1.0}, "--missing_eos_penalty expects 0 or more, got -1.0"),
        ({"overlong_penalty": -1.0}, "--overlong_penalty expects 0 or more, got -1.0"),
        ({"kl_in": "rewards"}, "--kl_in expects one of reward, loss, got 'rewards'; did you mean 'reward'?"),
        (
            {"stop_kl": 3.0, "kl_coef": 0.0},
            "--stop_kl 3.0 needs the KL to the reference, and --kl_coef 0 loads none; give a --kl_coef above 0, "
            "however small, or leave --stop_kl out",
        ),
        (
            {"kl_estimator": "k3+"},
            "--kl_estimator k3+ is k3 with the gradient of k2, and --kl_in reward has no gradient; give k3, or --kl_in "
            "loss",
        ),
        (
            {"norm_adv_over": "batch"},
            "--norm_adv_over batch is for --advantage grpo, rloo or grpo_passk, and it is gae; leave it out",
        ),
        (
            {"norm_adv_over": "batch", "advantage": "grpo", "norm_adv_by_std": False},
            "--norm_adv_over batch divides by a standard deviation, and --norm_adv_by_std false by none; leave one of "
            "them out",
        ),
        ({"stop_update_kl": 0.0}, "--stop_update_kl expects more than 0, got 0.0"),
        ({"kl_control": "pid"}, "--kl_control expects one of fixed, adaptive, got 'pid'; did you mean 'fixed'?"),
        (
            {"kl_control": "adaptive", "kl_coef": 0.0},
            "--kl_control adaptive multiplies --kl_coef, which is 0 and would stay so; give one to start from",
        ),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(AlgorithmArguments(**given)) == [sentence]
