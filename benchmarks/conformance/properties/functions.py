"""Properties of estimators and losses as functions. The first method is the formula in float64 here; the second the
references of `threestep audit`, written apart from these, or a property that needs no formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.conformance.policy_rows import ADVANTAGES, LENGTHS
from benchmarks.conformance.properties.sft import worst
from benchmarks.conformance.seen import off
from benchmarks.conformance.verdicts import Sight, View
from threestep.plugins.audit.references.estimators import groups as audited

REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.25], [0.7, 0.1, 0.9, 0.2], [2.0, -1.0, 0.0, 0.5]])
GROUPS = np.repeat(np.arange(3), 4)
MASK = torch.arange(16)[None] < torch.tensor(LENGTHS)[:, None]


def _drawn(seed: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def group_advantages(given: Any, extra: Mapping[str, Any]) -> Sight:
    values = given.group_advantages(REWARDS.clone()).double()
    exact = REWARDS.double()
    formula = (exact - exact.mean(1, keepdim=True)) / exact.std(1, keepdim=True)
    flat = exact.flatten().numpy()
    other = audited.grpo(flat, GROUPS, audited.group_std(flat, GROUPS, 1.0), 0.0)
    return Sight(
        [
            worst("beside (R - mean) / std", {"ddof 1": off(values, formula)}),
            worst("beside the audit's", {"ddof 1": off(values.flatten(), torch.from_numpy(other))}),
        ]
    )


def equal_rewards(given: Any, extra: Mapping[str, Any]) -> Sight:
    """Equal rewards teach nothing: seven of 1.3, whose mean in float32 is not 1.3; and many others."""

    def largest(reward: float, count: int) -> float:
        return float(given.group_advantages(torch.full((1, count), reward)).abs().max())

    one = largest(1.3, 7)
    others = {
        (tenth / 10, count): largest(tenth / 10, count) for tenth in (1, 3, 7, 9, 11, 17) for count in (3, 5, 6, 8, 12)
    }
    reward, count = max(others, key=lambda key: others[key])
    wrong = sum(value >= 1e-3 for value in others.values())
    return Sight(
        [
            View("7 rewards of 1.3", one < 1e-3, f"advantages of {one:.4f}"),
            View(
                "30 other groups",
                not wrong,
                f"{wrong} of 30 are not 0; the largest {others[reward, count]:.4f}, {count} rewards of {reward}",
            ),
        ]
    )


def rloo(given: Any, extra: Mapping[str, Any]) -> Sight:
    values = given.rloo(REWARDS.clone()).double()
    exact = REWARDS.double()
    formula = exact - (exact.sum(1, keepdim=True) - exact) / 3
    other = audited.rloo(exact.flatten().numpy(), GROUPS)
    return Sight(
        [
            worst("beside R - mean of the others", {"4 samples": off(values, formula)}),
            worst("beside the audit's", {"4 samples": off(values.flatten(), torch.from_numpy(other))}),
        ]
    )


def gae_returns(given: Any, extra: Mapping[str, Any]) -> Sight:
    """Returns, A + V, under gamma 0.9 and lambda 0.8; what stands in padding must not matter."""
    rewards, values, gamma, lam = _drawn(1), _drawn(2), 0.9, 0.8
    clean = [torch.where(MASK, each, 0.0) for each in (rewards, values)]
    seen = given.gae_returns(*(each.clone() for each in clean), MASK, gamma, lam).double()
    other = audited.gae(
        rewards[MASK].double().numpy(), values[MASK].double().numpy(), np.array(LENGTHS), gamma=gamma, lam=lam
    )
    expected = torch.from_numpy(other) + values[MASK].double()
    formula = torch.zeros(8, 17, dtype=torch.float64)
    for t in reversed(range(16)):
        following = values[:, t + 1].double() * MASK[:, t + 1] if t < 15 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        formula[:, t] = (delta + gamma * lam * formula[:, t + 1]) * MASK[:, t]
    exact = (formula[:, :16] + values)[MASK]
    return Sight(
        [
            worst("beside equations 11 to 16", {"returns": off(seen[MASK], exact)}),
            worst("beside the audit's", {"returns": off(seen[MASK], expected)}),
        ]
    )


def whiten(given: Any, extra: Mapping[str, Any]) -> Sight:
    values = _drawn(3)
    seen = given.whiten(values.clone(), MASK).double()[MASK]
    exact = values[MASK].double()
    formulas = {f"ddof {ddof}": (exact - exact.mean()) / exact.std(correction=ddof) for ddof in (0, 1)}
    near = min(formulas, key=lambda name: off(seen, formulas[name]))
    moments = max(abs(float(seen.mean())), abs(float(seen.std(correction=int(near[-1]))) - 1))
    other = given.whiten(torch.where(MASK, values, 99.0), MASK).double()[MASK]
    return Sight(
        [
            worst("beside (A - mean) / std over what counts", {near: off(seen, formulas[near])}),
            View("mean 0 and deviation 1", moments < 1e-3, f"within {moments:.0e}"),
            worst("with 99 in the padding", {near: off(other, seen)}),
        ],
        near,
    )


def kl_k3(given: Any, extra: Mapping[str, Any]) -> Sight:
    logprobs, ref = -_drawn(4).abs(), -_drawn(5).abs()
    leaf = logprobs.clone().requires_grad_()
    seen = given.kl("k3", leaf, ref)
    seen.sum().backward()
    back = (ref - logprobs).double()
    return Sight(
        [
            worst("beside exp(d) - d - 1", {"value": off(seen.detach().double(), back.exp() - back - 1)}),
            worst("gradient beside 1 - exp(d)", {"gradient": off(leaf.grad.double(), 1 - back.exp())}),
        ]
    )


def _clipped(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[mask].mean()


def _policy_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = -_drawn(6).abs() - 0.1
    return logprobs, logprobs + 0.3 * _drawn(7), torch.tensor(ADVANTAGES)[:, None].expand(8, 16)


def policy_loss(given: Any, extra: Mapping[str, Any]) -> Sight:
    logprobs, old, advantages = _policy_inputs()
    leaf, exact = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    seen = given.policy_loss(leaf, old, advantages, MASK, None)
    seen.backward()
    formula = _clipped(exact, old.double(), advantages.double(), MASK)
    formula.backward()
    return Sight(
        [
            worst("value beside equation 7 of PPO", {"token mean": abs(float(seen) / float(formula) - 1)}),
            worst("gradient beside its gradient", {"token mean": off(leaf.grad.double(), exact.grad)}),
        ]
    )


def policy_split(given: Any, extra: Mapping[str, Any]) -> Sight:
    """The whole batch beside four micro-batches of two, as an accumulation adds them."""
    logprobs, old, advantages = _policy_inputs()
    whole, parts = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    tokens = float(MASK.sum()) if extra.get("whole") or hasattr(given, "always_whole") else None
    value = given.policy_loss(whole, old, advantages, MASK, tokens)
    value.backward()
    summed = 0.0
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        loss = given.policy_loss(parts[rows], old[rows], advantages[rows], MASK[rows], tokens)
        loss = loss if tokens else loss / 4
        loss.backward()
        summed += float(loss)
    return Sight(
        [
            worst("value beside the whole", {"4 micro-batches": abs(summed / float(value) - 1)}),
            worst("gradient beside the whole", {"4 micro-batches": off(parts.grad, whole.grad)}),
        ]
    )
