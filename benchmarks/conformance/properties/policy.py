"""Properties of GRPO's losses in a trainer, on fixed responses (Shao et al. 2024; Yu et al. 2025; Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.conformance.material import make_model, make_tokenizer
from benchmarks.conformance.policy_rows import POLICY, policy_rows, response_logprobs
from benchmarks.conformance.properties.sft import worst
from benchmarks.conformance.seen import PolicyCase, Seen, gradient_of, loaded, off
from benchmarks.conformance.verdicts import Sight

Run = Callable[[PolicyCase], Seen]


def plain(weights: torch.Tensor, reduction: str) -> torch.Tensor:
    """The gradient of the published loss in float64. grpo: the mean over responses of their means (equation 3 of Shao
    et al.); dapo and bnpo: the mean over all tokens of the step (equation 8 of Yu et al.); dr_grpo: the sum over a
    constant (Liu et al., section 3.2). All with PPO's clip and the KL's third estimator in the loss."""
    model, rows = loaded(make_model(make_tokenizer()), weights), policy_rows()
    logprobs, mask = response_logprobs(model, rows["ids"]), rows["mask"]
    ratio = (logprobs - rows["old"].double()).exp()
    advantages = rows["advantages"].double()[:, None]
    clipped = ratio.clamp(1 - POLICY["clip"], 1 + POLICY["clip"])
    back = rows["ref"].double() - logprobs
    losses = -torch.minimum(ratio * advantages, clipped * advantages) + POLICY["beta"] * (back.exp() - back - 1)
    losses = losses.masked_fill(~mask, 0.0)
    if reduction == "grpo":
        loss = (losses.sum(1) / mask.sum(1)).mean()
    elif reduction == "dr_grpo":
        loss = losses.sum() / (len(losses) * POLICY["longest"])
    else:
        loss = losses.sum() / mask.sum()
    loss.backward()
    return gradient_of(model)


def _layouts(run: Run, reduction: str, extra: Mapping[str, Any]) -> Sight:
    seen = {f"{micro}x{8 // micro}": run(PolicyCase(reduction, micro, 8 // micro, extra)) for micro in (8, 4, 2)}
    first = seen["8x1"]
    between = {name: off(each.gradients[0], first.gradients[0]) for name, each in seen.items() if each is not first}
    beside = {
        name: off((each.weights[0] - each.weights[1]) / POLICY["rate"], plain(each.weights[0], reduction))
        for name, each in seen.items()
    }
    given = {name: off(each.gradients[0], plain(each.weights[0], reduction)) for name, each in seen.items()}
    return Sight(
        [
            worst("gradient beside 8x1", between),
            worst("gradient beside the formula's", given),
            worst("update beside the formula's gradient", beside),
        ]
    )


def grpo_sequence_mean(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _layouts(run, "grpo", extra)


def grpo_token_mean(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _layouts(run, "dapo", extra)


def grpo_constant(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _layouts(run, "dr_grpo", extra)


def grpo_bnpo(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _layouts(run, "bnpo", extra)
