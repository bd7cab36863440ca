"""Properties of direct preference optimization (Rafailov et al. 2023) and of the losses that share its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from benchmarks.conformance.material import make_model, make_tokenizer, pairs
from benchmarks.conformance.properties.sft import RATE, worst
from benchmarks.conformance.seen import PairCase, Seen, gradient_of, loaded, logprobs_of, off
from benchmarks.conformance.verdicts import Sight, View

Run = Callable[[PairCase], Seen]


def plain(seen: Seen, case: PairCase, step: int = 0) -> tuple[float, torch.Tensor]:
    """The mean over pairs of the published loss and its gradient, in float64, each response by itself."""
    model = loaded(make_model(make_tokenizer()), seen.weights[step])
    reference = make_model(make_tokenizer(), seed=seen.reference_seed).double().eval()
    summed, rows = 0.0, seen.pairs[step]
    for chosen, rejected in rows:
        with torch.no_grad():
            base = logprobs_of(reference, chosen).sum() - logprobs_of(reference, rejected).sum()
        margin = logprobs_of(model, chosen).sum() - logprobs_of(model, rejected).sum() - base
        loss = pair_loss(margin, case) / len(rows)
        loss.backward()
        summed += float(loss.detach())
    return summed, gradient_of(model)


def pair_loss(margin: torch.Tensor, case: PairCase) -> torch.Tensor:
    """sigmoid: equation 7 of Rafailov et al.; with label smoothing, equation 3 of Mitchell 2023 (conservative DPO).
    ipo: equation 17 of Azar et al. 2023, on sums of log-ratios. hinge: Zhao et al. 2023 as Liu et al. 2023 have it."""
    if case.loss == "ipo":
        return (margin - 1 / (2 * case.beta)) ** 2
    if case.loss == "hinge":
        return torch.relu(1 - case.beta * margin)
    right, wrong = logsigmoid(case.beta * margin), logsigmoid(-case.beta * margin)
    return -(1 - case.smoothing) * right - case.smoothing * wrong


def _moved(seen: Seen, step: int = 0) -> torch.Tensor:
    return (seen.weights[step] - seen.weights[step + 1]) / RATE


def _beside_formula(run: Run, case: PairCase) -> Sight:
    seen = run(case)
    loss, gradient = plain(seen, case)
    words = f"{seen.losses[0]:.4f} for {loss:.4f}"
    views = [
        worst("logged loss beside the formula", {words: abs(seen.losses[0] / loss - 1)}),
        worst("update beside the formula's gradient", {"8x1": off(_moved(seen), gradient)}),
    ]
    if seen.reference_seed == 0:  # at the reference every margin is 0, and the first loss says little
        later = run(replace(case, steps=2))
        second = Seen(weights=[seen.weights[-1]], pairs=[later.pairs[1]], reference_seed=0)
        expected = plain(second, case)[0]
        words = f"{later.losses[1]:.4f} for {expected:.4f}"
        views.append(worst("second step's loss beside the formula", {words: abs(later.losses[1] / expected - 1)}))
    return Sight(views)


def dpo_accumulation(run: Run, extra: Mapping[str, Any]) -> Sight:
    cases = {f"{micro}x{8 // micro}": PairCase(pairs(8), micro, 8 // micro) for micro in (8, 4, 2)}
    seen = {name: run(case) for name, case in cases.items()}
    first = seen["8x1"]
    moved = {name: off(_moved(each), _moved(first)) for name, each in seen.items() if each is not first}
    beside = {name: off(_moved(each), plain(each, cases[name])[1]) for name, each in seen.items()}
    return Sight([worst("update beside 8x1", moved), worst("update beside the formula's gradient", beside)])


def dpo_loss(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _beside_formula(run, PairCase(pairs(8), 8, 1))


def dpo_label_smoothing(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _beside_formula(run, PairCase(pairs(8), 8, 1, smoothing=0.1))


def dpo_hinge(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _beside_formula(run, PairCase(pairs(8), 8, 1, loss="hinge"))


def dpo_ipo(run: Run, extra: Mapping[str, Any]) -> Sight:
    return _beside_formula(run, PairCase(pairs(8), 8, 1, loss="ipo"))


def dpo_last_partial_batch(run: Run, extra: Mapping[str, Any]) -> Sight:
    """An epoch of 11 pairs as 2x4: the second step, 3 pairs in 2 micro-batches, is their mean."""
    case = PairCase(pairs(11), 2, 4, steps=-1)
    seen = run(case)
    met, last = sum(map(len, seen.pairs)), len(seen.pairs) - 1
    loss, gradient = plain(seen, case, last)
    return Sight(
        [
            View("pairs of the epoch", met == 11, f"{met} of 11"),
            View("steps of the epoch", last == 1, f"{last + 1} of 2"),
            worst(
                "last update beside their mean", {f"{len(seen.pairs[last])} pairs": off(_moved(seen, last), gradient)}
            ),
            worst(
                "last logged loss beside their mean",
                {f"{seen.losses[last]:.4f} for {loss:.4f}": abs(seen.losses[last] / loss - 1)},
            ),
        ]
    )
