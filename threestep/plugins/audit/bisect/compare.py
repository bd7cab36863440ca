"""Two digests beside each other: the first step that differs, and the first quantity in it as the data flow.

Where nothing may round differently, every bit counts. Otherwise numbers drift apart: from 1e-7 in the first step, a
little more in each. A fault is a jump, beyond what `JUMP` and `FLOORS` allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threestep.plugins.audit.bisect.digest_files import RunDigests, StepKey
from training.utils.base.errors import ThreestepError

JUMP = 100.0  # times the largest difference before: more is a fault
# The largest difference that rounding makes by itself, relative to the size of a quantity.
FLOORS = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}
_ROLLOUT = (
    "samples", "sampling_logprobs", "scores", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages",
    "returns",
)  # fmt: skip
_COUNTS = ("ids", "targets", "rows", "samples", "minibatch")  # exact whatever is rounded
DATA, ROLLOUT, FORWARD, BACKWARD, OPTIMIZER = "data", "rollout", "forward", "backward", "optimizer"


@dataclass(frozen=True)
class Compared:
    """A quantity of a step in both runs. part: of the step. model: "" for none. layer: "" but for gradients and
    weights. apart: relative; 0 if equal, NaN where it has no size: hashes. is_equal: bit for bit."""

    name: str
    part: str
    model: str
    layer: str
    a: Any
    b: Any
    apart: float
    is_equal: bool


@dataclass(frozen=True)
class FirstDifference:
    """key: of the step; (0, 0): the beginning. compared: the first that differs there. others: further ones there.
    before: the largest relative difference before it. bound: beyond which a difference is a fault; 0: every bit
    counts. last: the step before."""

    key: StepKey
    compared: Compared
    others: tuple[Compared, ...]
    before: float
    bound: float
    last: StepKey | None


@dataclass(frozen=True)
class Comparison:
    """steps: of both runs. first: None if there is none. drift: the largest difference of each step. of_rounding: what
    may round differently. random_from: the first step before which the generators have other states; None: there is
    none, or the ranks or the devices are not the same."""

    steps: tuple[StepKey, ...]
    first: FirstDifference | None
    drift: Mapping[StepKey, float]
    of_rounding: tuple[str, ...]
    random_from: StepKey | None = None


def compare(a: RunDigests, b: RunDigests, of_rounding: Sequence[str]) -> Comparison:
    """Find the first difference. of_rounding: what may round the runs differently; nothing: every bit counts."""
    if a.program != b.program:
        raise ThreestepError(
            f"two runs can be compared only if they come from the same program, got {a.program} and {b.program}"
        )
    steps = tuple(key for key in a.steps if key in b.steps)
    floor = 0.0 if not of_rounding else max(FLOORS[str(_dtype(run))] for run in (a, b))
    random_from = _random_from(a, b, steps) if a.begin["ranks"] == b.begin["ranks"] else None
    seen, drift, last = 0.0, dict[StepKey, float](), None
    norms = a.begin["weights"]
    lines = [((0, 0), list(_beginning(a, b))), *((key, None) for key in steps)]
    for key, known in lines:
        found = known if known is not None else list(_step(a.steps[key], b.steps[key], norms))
        wrong, largest = [], seen
        bound = max(floor, JUMP * seen) if floor else 0.0
        for each in found:
            if _is_wrong(each, bound):
                wrong.append(each)
            elif not wrong and math.isfinite(each.apart) and _is_judged(each):
                largest = max(largest, each.apart)
        if wrong:
            first = FirstDifference(key, wrong[0], tuple(wrong[1:]), seen, bound, last)
            return Comparison(steps, first, drift, tuple(of_rounding), random_from)
        drift[key], seen, last = largest, largest, key
    return Comparison(steps, None, drift, tuple(of_rounding), random_from)


def _random_from(a: RunDigests, b: RunDigests, steps: Sequence[StepKey]) -> StepKey | None:
    kinds = [str(run.environment.get("device", "")).partition(" on ")[2].partition(",")[0] for run in (a, b)]
    if kinds[0] != kinds[1]:  # cpu and cuda
        return None
    states = ((key, [run.steps[key]["hashes"].get("random") for run in (a, b)]) for key in steps)
    return next((key for key, (own, other) in states if own != other), None)


def _dtype(run: RunDigests) -> Any:
    return next((name for name in FLOORS if run.settings.get("dtype") == name), "bf16")


def _is_wrong(each: Compared, bound: float) -> bool:
    if not bound or each.name in _COUNTS:
        return not each.is_equal
    return _is_judged(each) and not each.apart <= bound


def _is_judged(each: Compared) -> bool:
    """False for what says nothing where rounding differs: hashes of floats, counts of first choices."""
    return not math.isnan(each.apart)


def _beginning(a: RunDigests, b: RunDigests) -> Iterator[Compared]:
    for model, layers in a.begin["weights"].items():
        others = b.begin["weights"].get(model, {})
        for layer in dict.fromkeys((*layers, *others)):
            yield _weights(model, layer, layers.get(layer), others.get(layer), norm=layers.get(layer, [0, 0, 1.0])[2])


def _weights(model: str, layer: str, a: Any, b: Any, *, norm: float | None) -> Compared:
    if a is None or b is None:
        return Compared("weights", OPTIMIZER, model, layer, a, b, math.inf, False)
    return Compared("weights", OPTIMIZER, model, layer, a[1], b[1], _relative(a[1], b[1], norm), a[0] == b[0])


def _step(a: Mapping[str, Any], b: Mapping[str, Any], norms: Mapping[str, Any]) -> Iterator[Compared]:
    """Every quantity of a step, as the data flow."""
    names = dict.fromkeys((*a["hashes"], *a["floats"], *b["hashes"], *b["floats"]))
    yield from (_quantity(name, a, b) for name in sorted(names, key=_place) if _place(name)[0] < 8)
    figures = dict.fromkeys((*a["figures"], *b["figures"]))
    in_order = sorted(figures, key=lambda name: ("grad_norm" in name, "learning_rate" in name or "skipped" in name))
    optimizer = [name for name in in_order if "learning_rate" in name or "skipped" in name]
    yield from (_figure(name, a, b) for name in in_order if name not in optimizer)
    has_layers = all({"weights", "gradients"} <= side.keys() for side in (a, b))
    for model, layers in (a["gradients"] if has_layers else {}).items():
        others = b["gradients"].get(model, {})
        scale = math.hypot(*(value or 0.0 for value in layers.values())) or 1.0
        for layer in reversed([*dict.fromkeys((*layers, *others))]):  # the last first: a backward's order
            own, other = layers.get(layer), others.get(layer)
            yield Compared("gradient", BACKWARD, model, layer, own, other, _relative(own, other, scale), own == other)
    yield from (_figure(name, a, b) for name in optimizer)
    for model, layers in (a["weights"] if has_layers else {}).items():
        others = b["weights"].get(model, {})
        for layer in dict.fromkeys((*layers, *others)):
            norm = norms.get(model, {}).get(layer, [0, 0, 1.0])[2]
            yield _weights(model, layer, layers.get(layer), others.get(layer), norm=norm)


def _place(name: str) -> tuple[int, int, str]:
    """The place of a quantity in the flow of the data."""
    model, _, own = name.rpartition("/")
    if model == "rollout":
        return 2, _ROLLOUT.index(own) if own in _ROLLOUT else len(_ROLLOUT), name
    order = {"random": 0, "rows": 1, "minibatch": 3, "ids": 4, "targets": 5, "reference": 6}
    return order.get(own, 7), {"logprobs": 0, "scores": 0, "loss": 1}.get(own, 2), name


def _quantity(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Compared:
    model, _, own = name.rpartition("/")
    part = ROLLOUT if model == "rollout" else DATA if _place(name)[0] < 6 else FORWARD
    hashes, sums = ([side[group].get(name) for side in (a, b)] for group in ("hashes", "floats"))
    is_equal = hashes[0] == hashes[1] if hashes != [None, None] else sums[0] == sums[1]
    apart = math.nan
    if sums != [None, None]:
        apart = math.inf if None in sums else _sums_apart(*sums)
    return Compared(own, part, model, "", sums[0] or hashes[0], sums[1] or hashes[1], apart, is_equal)


def _sums_apart(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b) or None in (*a, *b):  # None: it was not finite
        return 0.0 if a == b else math.inf
    if len(a) != 4:
        return _relative(a[0], b[0])
    if a[0] != b[0] or not _are_finite(*a, *b):
        return 0.0 if str(a) == str(b) else math.inf  # not as many numbers, or their sums are not finite
    scale = math.sqrt(max(a[2], b[2], 0.0))
    return max(_relative(a[place], b[place], scale) for place in (1, 3))


def _figure(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Compared:
    model, _, own = name.rpartition("/")
    x, y = (side["figures"].get(name) for side in (a, b))
    part = BACKWARD if own == "grad_norm" else OPTIMIZER if own in ("learning_rate", "skipped") else FORWARD
    judged = own in ("loss", "grad_norm", "learning_rate") or own.endswith("_loss")
    return Compared(own, part, model, "", x, y, _relative(x, y) if judged else math.nan, x == y)


def _relative(a: float | None, b: float | None, scale: float | None = None) -> float:
    """The distance of two numbers, by their size or `scale`. A number that was not finite is None."""
    if a is None or b is None or not _are_finite(a, b):
        return 0.0 if str(a) == str(b) else math.inf  # NaN is as NaN
    size = max(abs(a), abs(b)) if scale is None else scale
    return 0.0 if a == b else abs(a - b) / size if size else math.inf


def _are_finite(*numbers: float | None) -> bool:
    return all(number is not None and math.isfinite(number) for number in numbers)
