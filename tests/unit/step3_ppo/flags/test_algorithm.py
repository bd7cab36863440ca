"""Flags of the algorithm become settings; what does not go together is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.contracts.records import NO_CORRECTION
from training.step3_ppo.flags.algorithm import (
    Algorithm,
    experience_settings,
    learning_settings,
    selected_algorithm,
)
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.kl import KL_ESTIMATORS
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.utils.base.errors import Mistakes
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout

PLAN = PlanSettings(1)
FOUR = {"num_samples_per_prompt": 4, "per_device_generation_batch_size": 4}


def told(ppo: dict, **flags) -> list[str]:
    mistakes = Mistakes()
    selected_algorithm(AlgorithmArguments(**flags), PpoArguments(**ppo), mistakes)
    return mistakes.sentences


def algorithm(ppo: PpoArguments, **flags) -> Algorithm:
    mistakes = Mistakes()
    correction = flags.pop("correction", NO_CORRECTION)
    found = selected_algorithm(AlgorithmArguments(**flags), ppo, mistakes, correction=correction)
    mistakes.raise_if_any()
    assert found is not None
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_everything_goes_with_four_samples(name, loss):
    assert told(FOUR, advantage=name, policy_loss=loss) == []


@pytest.mark.needs_plugin("objectives")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"advantage": "rloo"},
            "--advantage rloo compares the samples of a prompt and --num_samples_per_prompt is 1; give 2 or more, or "
            "use gae, reinforce++ or remax",
        ),
        ({"dynamic_sampling_tries": 2}, "--dynamic_sampling_tries compares the samples of a prompt and --num_samples"),
        (
            {"advantage": "remax", "critic_warmup": 3},
            "--critic_warmup 3 trains a critic, and --advantage remax has none",
        ),
        ({"overlong_buffer_tokens": 300}, "--overlong_buffer_tokens expects at most --max_answer_seq_len 256, got 300"),
        ({"policy_loss": "pop"}, f"--policy_loss expects one of {', '.join(POLICY_LOSSES)} or FILE.py:NAME, got 'pop'"),
        ({"loss_aggregation": "token_mean"}, f"--loss_aggregation expects one of {', '.join(AGGREGATIONS)}, got"),
        ({"kl_estimator": "kk"}, f"--kl_estimator expects one of {', '.join(KL_ESTIMATORS)}, got 'kk'"),
    ],
)
def test_what_does_not_go_together(flags, sentence):
    (said,) = told({}, **flags)
    assert said.startswith(sentence)


def test_unknown_names_are_told_together():
    said = told({}, advantage="grp", loss_aggregation="tokenmean")
    assert len(said) == 2 and "did you mean 'token-mean'" in said[1]


@pytest.mark.needs_plugin("objectives")
def test_each_loss_has_its_authors_clip_and_aggregation():
    ppo = PpoArguments()
    for loss, flags, low, high, aggregation in (
        ("ppo", {}, 0.2, 0.2, "token-mean"),
        ("gspo", {}, 3e-4, 4e-4, "seq-mean-token-mean"),
        ("cispo", {}, 1.0, 4.0, "token-mean"),
        ("gspo", {"clip_range": 0.1}, 0.1, 0.1, "seq-mean-token-mean"),
        ("ppo", {"clip_range": 0.1, "clip_range_high": 0.28}, 0.1, 0.28, "token-mean"),
        ("ppo", {"clip_range_low": 0.3, "loss_aggregation": "seq-mean-token-sum"}, 0.3, 0.2, "seq-mean-token-sum"),
    ):
        made = learning_settings(algorithm(ppo, policy_loss=loss, **flags), ppo)
        assert (made.policy.clip_low, made.policy.clip_high, made.aggregation) == (low, high, aggregation)
        assert made.policy_loss is POLICY_LOSSES[loss]


def test_the_flags_arrive():
    ppo = PpoArguments(temperature=0.7, clip_reward=2.0, max_answer_seq_len=99, **FOUR)
    given = algorithm(
        ppo, advantage="grpo", gamma=0.5, lam=0.4, norm_adv_by_std=False, dual_clip=3.0, clip_range_value=0.3,
        entropy_coef=0.01, missing_eos_penalty=1.5,
        overlong_buffer_tokens=7, overlong_penalty=0.9, mask_truncated_responses=True,
        kl_coef=0.05, kl_estimator="k2", kl_control="adaptive",
        kl_target=2.0, kl_horizon=500.0,
    )  # fmt: skip
    learning = learning_settings(given, ppo)
    assert learning.policy.dual_clip == 3.0 and learning.policy.options is None
    assert (learning.clip_range_value, learning.entropy_coef) == (0.3, 0.01)
    made = experience_settings(given, ppo, SequenceLayout(PLAN, 5))
    assert made.estimator is ESTIMATORS["grpo"] and not made.whiten_advantages
    assert (made.advantage.gamma, made.advantage.lam, made.advantage.norm_by_std) == (0.5, 0.4, False)
    length = made.scoring.length
    assert (length.max_tokens, length.missing_eos_penalty, length.overlong_buffer_tokens) == (99, 1.5, 7)
    assert length.overlong_penalty == 0.9 and length.mask_truncated_responses
    assert (made.samples_per_prompt, made.reading.temperature, made.scoring.clip_reward, made.layout.pad_token_id) == (
        4,
        0.7,
        2.0,
        5,
    )
    assert made.kl.estimator is KL_ESTIMATORS["k2"] and made.kl.control.kl_coef == 0.05
    control = made.kl.control
    control.update(4.0, 50)  # error cut to 0.2, times 50 / 500
    assert control.target is not None and control.kl_coef == pytest.approx(0.05 * 1.02)


def test_defaults_that_depend_on_others():
    ppo = PpoArguments(**FOUR)

    def made(**flags):
        return experience_settings(algorithm(ppo, **flags), ppo, SequenceLayout(PLAN, 0))

    assert made().kl.estimator is KL_ESTIMATORS["k1"]
    assert made(kl_in="loss").kl.estimator is KL_ESTIMATORS["k3"]
    assert made(kl_in="loss", kl_estimator="k1").kl.estimator is KL_ESTIMATORS["k1"]
    assert made().kl.control.target is None
    whitened = {name for name in ESTIMATORS if made(advantage=name).whiten_advantages}
    assert whitened == {"gae", "reinforce++", "reinforce++_baseline"}
    assert made(advantage="grpo", whiten_advantages=True).whiten_advantages
    assert not made(whiten_advantages=False).whiten_advantages
    assert algorithm(ppo).wants_reference and not algorithm(ppo, kl_coef=0.0).wants_reference


@pytest.mark.needs_plugin("objectives")
def test_old_log_probabilities_are_read_where_something_needs_them():
    one_step = PpoArguments(**FOUR, per_device_training_batch_size=16)

    def reads(ppo: PpoArguments = one_step, **flags) -> bool:
        flags = {"advantage": "grpo", "kl_in": "loss", **flags}
        return experience_settings(algorithm(ppo, **flags), ppo, SequenceLayout(PLAN, 0)).reading.reads_old_logprobs

    assert not reads()
    assert not reads(kl_in="reward", kl_coef=0.0)
    assert reads(kl_in="reward")
    corrected, bypassed = (
        SimpleNamespace(bypasses=bypasses, reads_old_policy=not bypasses) for bypasses in (False, True)
    )
    assert reads(correction=corrected)
    assert not reads(kl_in="reward", correction=bypassed)
    assert reads(kl_in="reward", kl_estimator="full", correction=bypassed)  # which takes the actor's logits
    assert reads(policy_loss="kl_cov")
    assert reads(PpoArguments(**FOUR, per_device_training_batch_size=8))
    two_epochs = PpoArguments(**FOUR, per_device_training_batch_size=16, ppo_epochs=2)
    assert reads(two_epochs) and not reads(two_epochs, correction=bypassed)


@pytest.mark.needs_plugin("objectives")
def test_what_an_estimator_reads_and_divides_by():
    ppo = PpoArguments(num_samples_per_prompt=4, per_device_training_batch_size=64)

    def made(**flags):
        algorithm = selected_algorithm(AlgorithmArguments(**flags), ppo, Mistakes())
        return experience_settings(algorithm, ppo, SequenceLayout(PlanSettings(1), 0))

    assert not made(advantage="grpo", kl_coef=0.0).reading.reads_old_logprobs  # on-policy
    settings = made(advantage="optimal_token_baseline", kl_coef=0.0, otb_zero_tail=False)
    assert (
        settings.reading.reads_old_logprobs
        and not settings.advantage.options.otb_zero_tail
        and settings.advantage.norm_over is None
    )
    assert made(advantage="rloo", norm_adv_over="batch").advantage.norm_over == "batch"
