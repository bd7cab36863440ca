"""An estimator and a policy loss of the user's file: they train as the built-in ones do, and mistakes are sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.flags.algorithm import estimator_named, policy_loss_named, selected_algorithm
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.losses import POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens
from training.utils.base.errors import Mistakes, ThreestepError

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
    assert "compares the samples of a prompt and --num_samples_per_prompt is 1; give 2" in mistakes.sentences[0]


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
        ("number", "^--advantage expects a function, got '.*own.py:number', which is int$"),
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
