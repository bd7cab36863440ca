"""Properties of KTO (Ethayarajh et al. 2024), on responses that are marked one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.conformance.material import make_model, make_tokenizer, marked
from benchmarks.conformance.properties.sft import worst
from benchmarks.conformance.seen import MarkedCase, Seen, gradient_of, loaded, logprobs_of, off
from benchmarks.conformance.verdicts import Sight

Run = Callable[[MarkedCase], Seen]


def plain(seen: Seen, case: MarkedCase) -> tuple[float, torch.Tensor, float]:
    """Equation 8's mean over the responses with weights of 1, its gradient, and the point z, in float64: z is the mean
    log-ratio of all mismatched pairs of the step, at least 0, and has no gradient."""
    model = loaded(make_model(make_tokenizer()), seen.weights[-2])
    reference = make_model(make_tokenizer(), seed=seen.reference_seed).double().eval()
    with torch.no_grad():
        apart = [(logprobs_of(model, row) - logprobs_of(reference, row)).sum() for row in seen.mismatched]
        point = torch.stack(apart).mean().clamp(min=0.0)
    summed = 0.0
    for row, is_good in seen.marked:
        with torch.no_grad():
            base = logprobs_of(reference, row).sum()
        reward = logprobs_of(model, row).sum() - base - point
        loss = (1 - torch.sigmoid(case.beta * (reward if is_good else -reward))) / len(seen.marked)
        loss.backward()
        summed += float(loss.detach())
    return summed, gradient_of(model), float(point)


def _moved(seen: Seen, case: MarkedCase) -> torch.Tensor:
    return (seen.weights[-2] - seen.weights[-1]) / case.rate


def kto_loss(run: Run, extra: Mapping[str, Any]) -> Sight:
    case = MarkedCase(marked(8))
    seen = run(case)
    loss, gradient, point = plain(seen, case)
    words = f"{seen.losses[-1]:.4f} for {loss:.4f}"
    return Sight(
        [
            worst("logged loss beside the formula", {words: abs(seen.losses[-1] / loss - 1)}),
            worst("update beside the formula's gradient", {"8x1": off(_moved(seen, case), gradient)}),
        ],
        f"z is {point:.2f}",
    )


def kto_accumulation(run: Run, extra: Mapping[str, Any]) -> Sight:
    cases = {f"{micro}x{8 // micro}": MarkedCase(marked(8), micro, 8 // micro) for micro in (8, 4, 2)}
    seen = {name: run(case) for name, case in cases.items()}
    first = seen["8x1"]
    moved = {
        name: off(_moved(each, cases[name]), _moved(first, cases[name]))
        for name, each in seen.items()
        if each is not first
    }
    beside = {name: off(_moved(each, cases[name]), plain(each, cases[name])[1]) for name, each in seen.items()}
    points = ", ".join(f"{plain(each, cases[name])[2]:.2f}" for name, each in seen.items())
    return Sight(
        [worst("update beside 8x1", moved), worst("update beside the formula's gradient", beside)],
        f"z over the step is {points}",
    )
