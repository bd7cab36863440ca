"""The maths of every step given float64 computes in float64: no constant, cast or sum of it is narrower on the way."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.objectives import objective
from training.step1_sft import loss as sft
from training.step2_dpo import loss as dpo
from training.step2_dpo.loss import LOSSES
from training.step2_reward import loss as reward
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.estimators import moments, whiten
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, shaped_rewards
from training.step3_ppo.kl import KL_ESTIMATORS
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals, entropy_loss, value_loss

B, R = 6, 5
LENGTHS_B = torch.tensor([5, 3, 1, 4, 2, 5])
INSIDE_BR = torch.arange(R) < LENGTHS_B.unsqueeze(1)
SEQUENCE_M = torch.arange(B).repeat_interleave(LENGTHS_B)
GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1])
HALF, FULL = (torch.float16, torch.bfloat16, torch.float32), torch.float64


class NoNarrowing(TorchDispatchMode):
    """AssertionError at the first operation that makes a floating-point tensor narrower than float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        # The checkpoint of torch 2.11 makes one float32 tensor without an element.
        narrow = [leaf for leaf in made if leaf.dtype in HALF and leaf.numel()]
        assert not narrow, f"{func} makes {narrow[0].dtype}"
        return found


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FULL)


def judge(compute: Any) -> None:
    """`compute` narrows nothing, and does not read torch's default dtype."""
    with NoNarrowing():
        plain = compute()
    torch.set_default_dtype(FULL)
    try:
        wide = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(tree_leaves(plain), tree_leaves(wide), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
            assert one.dtype not in HALF


def tokens() -> PolicyTokens:
    count = len(SEQUENCE_M)
    selected_M = drawn(count, seed=4) > 0
    old_M = drawn(count, seed=1)
    new_M = (old_M + 0.3 * drawn(count, seed=2)).requires_grad_()
    return PolicyTokens(new_M, old_M, drawn(count, seed=3), SEQUENCE_M, selected_M)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_policy_losses(name):
    entry = POLICY_LOSSES[name]
    settings = PolicyLossSettings(0.1, 0.3, 1.7, options=entry.flags and entry.flags())

    def compute() -> Any:
        given = tokens()
        loss_M, clipped_M = entry.loss(given, settings)
        loss_M.sum().backward()
        return loss_M.detach(), clipped_M, given.logprobs_M.grad

    judge(compute)


def test_sums_over_tokens():
    judge(lambda: (sft.sft_loss(drawn(7), 3.0), entropy_loss(drawn(7), 0.3)))


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_aggregations(name):
    counted_M = torch.ones(len(SEQUENCE_M), dtype=FULL)
    judge(lambda: AGGREGATIONS[name](counted_M, SEQUENCE_M, StepTotals(17.0, 6.0, 7.0)))


@pytest.mark.parametrize("norm_over", [None, "group", "batch"])
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_advantages(name, norm_over):
    inputs = functools.partial(
        AdvantageInputs,
        rewards_BR=drawn(B, R, seed=1),
        response_lengths_B=LENGTHS_B,
        group_B=GROUP_B,
        values_BR=drawn(B, R, seed=2),
        greedy_scores_B=drawn(B, seed=3),
        logprobs_BR=-drawn(B, R, seed=4).abs(),
        collisions_BR=drawn(B, R, seed=5).sigmoid(),
        weights_BR=drawn(B, R, seed=6).exp(),
    )
    judge(
        lambda: ESTIMATORS[name].estimate(
            inputs(), AdvantageSettings(0.9, 0.7, True, norm_over, (own := ESTIMATORS[name].flags) and own())
        )
    )


def test_whitening_and_shaped_rewards():
    values_BR = drawn(B, R, seed=1)
    judge(lambda: whiten(values_BR, INSIDE_BR, moments(values_BR, INSIDE_BR)))
    judge(lambda: shaped_rewards(drawn(B), values_BR, LENGTHS_B, 0.3, turns_BR=drawn(B, R, seed=2)))


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_kl(name):
    estimator = KL_ESTIMATORS[name]
    shape = (7, 11) if estimator.of_logits else (7,)

    def compute() -> Any:
        logprobs = drawn(*shape).requires_grad_()
        kl_M = estimator.estimate(logprobs, drawn(*shape, seed=1))
        kl_M.sum().backward()
        return kl_M.detach(), logprobs.grad

    judge(compute)


def test_values():
    judge(lambda: value_loss(drawn(9), drawn(9, seed=1), drawn(9, seed=2), 0.3))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_preferences(loss_type):
    better_Q, worse_Q, weight_Q = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), drawn(3, seed=2).abs()
    has_smoothing = hasattr(LOSSES[loss_type].flags, "label_smoothing")
    how = objective(loss_type, 0.1, **({"label_smoothing": 0.1} if has_smoothing else {}))

    def compute() -> Any:
        ratios_B = dpo.log_ratios(-drawn(3).abs(), drawn(3, seed=1), torch.tensor([3, 5, 7]), how.loss)
        is_best_B = torch.tensor([True, False, False])
        columns = {"is_good": torch.tensor([1.0, 0.0, 1.0], dtype=FULL)}
        responses = dpo.Responses(
            ratios_B, drawn(3), drawn(3), better_Q, worse_Q, weight_Q, is_best_B, columns, reference_point=0.2
        )
        options = reward.LossOptions(0.3, 0.1, 0.7)
        ranking = reward.ranking_loss(
            drawn(3), drawn(3, seed=1), drawn(3, seed=4), weight_Q, prompts_in_step=3.0, options=options
        )
        return dpo.preference_loss(responses, 3.0, how), ranking

    judge(compute)
