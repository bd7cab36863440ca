"""Flags of the algorithm become settings; what does not go together is told. An estimator and a policy loss of the
user's file train as the built-in ones do, and mistakes are sentences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.contracts.records import NO_CORRECTION
from training.step3_ppo.flags.algorithm import (
    Algorithm,
    estimator_named,
    experience_settings,
    learning_settings,
    policy_loss_named,
    selected_algorithm,
)
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.kl import KL_ESTIMATORS
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens
from training.utils.base.errors import Mistakes, ThreestepError
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
            "--advantage rloo compares the samples of a prompt, but --num_samples_per_prompt is 1; set it to 2 or "
            "more, or use gae, reinforce++ or remax",
        ),
        ({"dynamic_sampling_tries": 2}, "--dynamic_sampling_tries compares the samples of a prompt, but --num_samples"),
        (
            {"advantage": "remax", "critic_warmup": 3},
            "--critic_warmup 3 trains a critic, but --advantage remax has none",
        ),
        (
            {"overlong_buffer_tokens": 300},
            "--overlong_buffer_tokens expects at most 256 (--max_answer_seq_len), got 300",
        ),
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


OWN = """
import torch
from training.step3_ppo.advantages import Estimator
from training.step3_ppo.losses import PolicyLoss

def to_the_mean(inputs, settings):
    return inputs.on_tokens(inputs.outcomes_B - inputs.outcomes_B.mean()), None

grouped = Estimator(to_the_mean, needs_groups=True, whitens=True)
critic = Estimator(to_the_mean, needs_critic=True)

def plain_gradient(tokens, settings):
    return -tokens.advantages_M * tokens.logprobs_M, torch.zeros_like(tokens.sequence_M, dtype=torch.bool)

by_sequence = PolicyLoss(plain_gradient, aggregation="seq-mean-token-sum", clip_low=0.5)
misnamed = PolicyLoss(plain_gradient, aggregation="token_mean")

def of_one(inputs): return inputs
def alone(inputs, settings): return inputs.rewards_BR
def short(inputs, settings): return inputs.rewards_BR[:, :1], None
def raises(inputs, settings): return {}["here"], None
def in_place(inputs, settings):
    for tensor in (inputs.rewards_BR, inputs.response_lengths_B, inputs.group_B, inputs.values_BR):
        tensor.zero_()
    return inputs.rewards_BR, inputs.rewards_BR
def loss_in_place(tokens, settings):
    loss_M = -tokens.logprobs_M.mul_(1.0)
    for tensor in (tokens.old_logprobs_M, tokens.advantages_M, tokens.sequence_M):
        tensor.zero_()
    return loss_M, tokens.sequence_M > 0
def constant(tokens, settings): return tokens.logprobs_M.detach(), tokens.sequence_M < 0
number = 5


def nan(inputs, settings):
    return inputs.rewards_BR / 0.0, None
"""
INPUTS = AdvantageInputs(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([2, 1]), torch.tensor([0, 1]))
SETTINGS, CLIP = AdvantageSettings(1.0, 0.95, True), PolicyLossSettings(0.2, 0.2)


def tokens() -> PolicyTokens:
    logprobs_M = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    return PolicyTokens(logprobs_M, logprobs_M.detach(), torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0, 0, 1]))


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path}/own.py:{name}"


def test_a_function_is_an_estimator_without_critic_and_groups(own):
    estimator = estimator_named(own("to_the_mean"))
    advantages_BR, returns_BR = estimator.estimate(INPUTS, SETTINGS)
    assert advantages_BR.tolist() == [[1.5, 1.5], [-1.5, 0.0]] and returns_BR is None
    assert (estimator.needs_critic, estimator.needs_groups, estimator.whitens) == (False, False, False)


def test_an_estimator_says_what_it_needs(own):
    estimator = estimator_named(own("grouped"))
    assert estimator.needs_groups and estimator.whitens
    mistakes = Mistakes()
    selected_algorithm(AlgorithmArguments(advantage=own("grouped")), PpoArguments(), mistakes)
    assert "compares the samples of a prompt, but --num_samples_per_prompt is 1; set it to 2" in mistakes.sentences[0]


def test_a_function_is_a_policy_loss_with_the_usual_defaults(own):
    mine, usual = policy_loss_named(own("plain_gradient")), POLICY_LOSSES["ppo"]
    loss_M, clipped_M = mine.loss(tokens(), CLIP)
    assert torch.equal(loss_M, -tokens().advantages_M * tokens().logprobs_M) and not clipped_M.any()
    assert (mine.aggregation, mine.clip_low, mine.selects) == (usual.aggregation, usual.clip_low, None)
    given = policy_loss_named(own("by_sequence"))
    assert (given.aggregation, given.clip_low) == ("seq-mean-token-sum", 0.5)


def test_functions_may_change_their_tensors(own):
    """Which the loop reads again: values and rewards are figures and targets, sequences weigh the loss."""
    inputs = replace(INPUTS, values_BR=torch.ones(2, 2))
    before = [tensor.clone() for tensor in (inputs.rewards_BR, inputs.response_lengths_B, inputs.group_B)]
    estimator_named(own("in_place")).estimate(inputs, SETTINGS)
    assert all(map(torch.equal, (inputs.rewards_BR, inputs.response_lengths_B, inputs.group_B), before))
    assert torch.equal(inputs.values_BR, torch.ones(2, 2))
    given = tokens()
    loss_M, _ = policy_loss_named(own("loss_in_place")).loss(given, CLIP)
    loss_M.sum().backward()
    assert given.logprobs_M.grad.tolist() == [-1.0, -1.0, -1.0] and given.old_logprobs_M.tolist() == [-1.0, -2.0, -0.5]
    assert given.advantages_M.tolist() == [1.0, 2.0, -1.0] and given.sequence_M.tolist() == [0, 0, 1]


def test_names_of_the_tables_are_their_entries():
    assert all(estimator_named(name) is estimator for name, estimator in ESTIMATORS.items())
    assert all(policy_loss_named(name) is policy_loss for name, policy_loss in POLICY_LOSSES.items())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "^--advantage: '.*own.py' has no 'missing'"),
        ("number", "^--advantage expects a function, got '.*own.py:number', which is of type int$"),
        ("of_one", r"^--advantage expects a function of \(inputs, settings\), got '.*own.py:of_one', which takes "
         r"\(inputs\): too many positional arguments$"),
    ],
)  # fmt: skip
def test_what_is_no_estimator(own, name, said):
    with pytest.raises(ThreestepError, match=said):
        estimator_named(own(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alone", r"^--advantage expects '.*alone' to return the pair \(advantages_BR, returns_BR\), got Tensor$"),
        ("short", r"^--advantage expects advantages_BR of '.*short' to be a tensor of shape \[2, 2\], got \[2, 1\]$"),
        ("critic", r"^--advantage expects returns_BR of '.*critic' to be a tensor of shape \[2, 2\], got NoneType$"),
        ("raises", r"^raises raised KeyError: 'here' \(own.py, line 21\)$"),
        ("nan", "^--advantage: advantages_BR of '.*own.py:nan' are not finite; do not divide by 0"),
    ],
)
def test_what_an_estimator_may_not_return(own, name, said):
    with pytest.raises(ThreestepError, match=said):
        estimator_named(own(name)).estimate(INPUTS, SETTINGS)


def test_mistakes_in_a_policy_loss(own):
    with pytest.raises(ThreestepError, match="^--policy_loss: '.*own.py' has no 'plain_gradients'; did you mean"):
        policy_loss_named(own("plain_gradients"))
    with pytest.raises(ThreestepError, match=r"^--policy_loss expects a function of \(tokens, settings\), got"):
        policy_loss_named(own("of_one"))
    with pytest.raises(ThreestepError, match="^--policy_loss expects loss_M of '.*' to have a gradient, got none"):
        policy_loss_named(own("constant")).loss(tokens(), CLIP)
    mistakes = Mistakes()
    selected_algorithm(AlgorithmArguments(policy_loss=own("misnamed")), PpoArguments(), mistakes)
    assert mistakes.sentences[0].startswith("--loss_aggregation expects one of token-mean, ")
