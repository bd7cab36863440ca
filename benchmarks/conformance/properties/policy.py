"""Properties of GRPO's losses in a trainer, on fixed responses (Shao et al. 2024; Yu et al. 2025; Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.conformance.material import make_model, make_tokenizer
from benchmarks.conformance.policy_rows import POLICY, responses
from benchmarks.conformance.properties.sft import worst
from benchmarks.conformance.seen import PolicyCase, Seen, gradient_of, loaded, off
from benchmarks.conformance.verdicts import Sight

Run = Callable[[PolicyCase], Seen]


def plain(seen: Seen, reduction: str) -> torch.Tensor:
    """The gradient of the published loss in float64. grpo: the mean over responses of their means (equation 3 of Shao
    et al.); dapo and bnpo: the mean over all tokens of the step (equation 8 of Yu et al.); dr_grpo: the sum over a
    constant (Liu et al., section 3.2). All with PPO's clip and the KL's third estimator in the loss."""
    model = loaded(make_model(make_tokenizer()), seen.weights[0])
    rows = seen.responses or responses()
    tokens, loss = sum(len(row.old) for row in rows), torch.zeros((), dtype=torch.float64)
    for row in rows:
        logprobs = model(input_ids=row.ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(1, row.ids[1:, None])[-len(row.old) :, 0]
        ratio = (logprobs - row.old.double()).exp()
        clipped = ratio.clamp(1 - POLICY["clip"], 1 + POLICY["clip"])
        back = row.ref.double() - logprobs
        losses = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        losses = losses + POLICY["beta"] * (back.exp() - back - 1)
        if reduction == "grpo":
            loss = loss + losses.mean() / len(rows)
        else:
            loss = loss + losses.sum() / (len(rows) * POLICY["longest"] if reduction == "dr_grpo" else tokens)
    loss.backward()
    return gradient_of(model)


def _layouts(run: Run, reduction: str, extra: Mapping[str, Any]) -> Sight:
    seen = {f"{micro}x{8 // micro}": run(PolicyCase(reduction, micro, 8 // micro, extra)) for micro in (8, 4, 2)}
    first = seen["8x1"]
    between = {name: off(each.gradients[0], first.gradients[0]) for name, each in seen.items() if each is not first}
    beside = {
        name: off((each.weights[0] - each.weights[1]) / POLICY["rate"], plain(each, reduction))
        for name, each in seen.items()
    }
    given = {name: off(each.gradients[0], plain(each, reduction)) for name, each in seen.items()}
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
