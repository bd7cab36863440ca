"""A bisection in words: lines for a terminal, and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from threestep.plugins.audit.bisect.compare import BACKWARD, DATA, FORWARD, OPTIMIZER, ROLLOUT
from threestep.plugins.audit.bisect.digest_files import environments_that_differ
from threestep.plugins.audit.bisect.records import WEIGHTS

if TYPE_CHECKING:
    from threestep.plugins.audit.bisect.bisect import Bisection
    from threestep.plugins.audit.bisect.compare import Compared, Comparison, FirstDifference
    from threestep.plugins.audit.bisect.digest_files import RunDigests, StepKey
    from threestep.plugins.audit.bisect.records import Located

_MOST_LISTED = 12
_ORDER = (WEIGHTS, DATA, ROLLOUT, FORWARD, BACKWARD, OPTIMIZER)


def headline(a: RunDigests, b: RunDigests, found: Bisection) -> str:
    """The two runs, in words."""
    steps = len({step for step, _ in found.comparison.steps})
    return f"A {a.folder}, B {b.folder}: {a.program}, {steps:,} step{'' if steps == 1 else 's'} in common"


def verdict(found: Bisection) -> str:
    """One sentence: where the runs part, or that they do not."""
    comparison = found.comparison
    first = comparison.first
    if first is None:
        if not comparison.of_rounding:
            return "no difference: every number of every step is equal, bit for bit"
        steps = [own for key, own in comparison.drift.items() if key != (0, 0)]
        if not any(steps):
            return "no difference: every number of every step is equal"
        return (
            f"no fault: numbers drift from {_size(steps[0])} in the first step to {_size(steps[-1])} in the last, "
            "and no step has a jump"
        )
    if found.located and not _is_earlier(first, found):
        place = found.located[0]
        return f"the first difference is in {_step(found.key or first.key)}, {_place(place)}{_cause(found)}"
    return f"the first difference is {_where(first)}: {_compared(first.compared)}{_size_of(first)}{_cause(found)}"


def _is_earlier(first: FirstDifference, found: Bisection) -> bool:
    """True if the digests have a difference before all that the records have: of a number that records lack."""
    place = (found.located or ())[0]
    return found.key == first.key and _ORDER.index(first.compared.part) < _ORDER.index(place.part)


def _place(place: Located) -> str:
    many = f"; {counts(place)} differ" if place.of > 1 else ""
    return f"{place.part}: {place.name}, {place.where}: {place.a} and {place.b}{many}"


def counts(place: Located) -> str:
    """The numbers of a quantity that differ, of all; "" where there is one."""
    return f"{place.differing:,} of {place.of:,} {place.unit}" if place.of > 1 else ""


def _where(first: FirstDifference) -> str:
    return "at the beginning" if first.key == (0, 0) else f"in {_step(first.key)}"


def _step(key: StepKey) -> str:
    return f"step {key[0]:,}" + (f", update {key[1]:,}" if key[1] else "")


def _compared(each: Compared) -> str:
    name = " of the ".join([each.name, *([each.model] if each.model not in ("", "train", "rollout") else [])])
    layer = f", {each.layer}" if each.layer else ""
    values = f": {_value(each.a)} and {_value(each.b)}"
    return f"{each.part}: {name}{layer}{values}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"sum {value[1]:.9g} of {value[0]:,.0f} numbers" if len(value) == 4 else f"{value[0]:.9g}"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _size_of(first: FirstDifference) -> str:
    apart = first.compared.apart
    if not first.bound:
        return "" if math.isnan(apart) or not apart else f", a relative difference of {_size(apart)}"
    if math.isnan(apart):
        return ", which rounding cannot explain"
    return f", {_size(apart)} apart: a jump from {_size(first.before)}; drift stays below {_size(first.bound)}"


def _size(value: float) -> str:
    return "infinitely" if math.isinf(value) else f"{value:.1e}"


def _cause(found: Bisection) -> str:
    if not found.settings:
        return ""
    words = [f"--{name} {a} and {b}" for name, (a, b) in found.settings.items()]
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return f"; flags that differ: {', '.join(words[:4])}{more}"


def as_lines(a: RunDigests, b: RunDigests, found: Bisection) -> list[str]:
    """The whole of it; the verdict is last, before what to do next."""
    comparison, lines = found.comparison, [headline(a, b, found)]
    if comparison.of_rounding:
        lines.append(f"  rounding may differ: {'; '.join(comparison.of_rounding)}")
    if comparison.first is not None:
        first = comparison.first
        lines.append(f"  by their digests {_where(first)}: {_compared(first.compared)}{_size_of(first)}")
    for place in (found.located or ())[:_MOST_LISTED]:
        lines.append(f"  {_place(place)}")
    if len(found.located or ()) > _MOST_LISTED:
        lines.append(f"  and {len(found.located or ()) - _MOST_LISTED} more quantities")
    if found.located is not None and not found.located:
        lines.append("  in the reruns, the two records of this step are equal")
    lines += [f"  note: {note}" for note in notes(a, b, found)]
    return [*lines, verdict(found), *(f"next: {each}" for each in advice(found))]


# What remains to be looked at where all before a part is equal.
_ADVICE = {
    WEIGHTS: (
        "the weights already differ before the step, and nothing differs earlier: compare the models or checkpoints "
        "that the runs start from"
    ),
    DATA: (
        "the data differ, not the model: compare the files, the tokenizer and the chat template; `threestep inspect` "
        "shows rows, dropped rows and tokens"
    ),
    ROLLOUT: "weights and prompts are equal: compare how responses are drawn and rewarded",
    FORWARD: "data and weights are equal: compare the code of the forward pass and the libraries it uses",
    BACKWARD: (
        "the forward pass is equal: compare what changes gradients, such as clipping, hooks, accumulation and the "
        "exchange between ranks"
    ),
    OPTIMIZER: "the gradients are equal: compare the learning rate schedule and the optimizer's settings and version",
}


def advice(found: Bisection) -> list[str]:
    """Return what to do next, in sentences; nothing where the runs do not differ."""
    first = found.comparison.first
    if first is None:
        return []
    part = _part_of(first, found)
    if found.located is not None and found.notes:
        parts = ["first make both runs reproducible, as the notes say: their reruns do not match the original runs"]
    elif found.settings:
        parts = ["give one run the other's flags, one at a time, until they agree"]
    elif first.compared.name == "random" and part == DATA:
        parts = [
            "the states of the random generators differ before the step: compare the seeds, and what drew random "
            "numbers earlier"
        ]
    else:
        parts = [_ADVICE[part]]
    if found.records:
        places = " and ".join(f"`threestep audit {place}`" for place in found.records)
        parts.append(f"{places} check each of the two steps on its own")
    elif found.located is None and found.comparison.steps:
        parts.append(
            "--trust_run reruns both up to this step, with their own settings and code, and compares all numbers"
        )
    return parts


def _part_of(first: FirstDifference, found: Bisection) -> str:
    """The part of the step in which the verdict has the first difference."""
    if found.located and not _is_earlier(first, found):
        return found.located[0].part
    return WEIGHTS if first.key == (0, 0) else first.compared.part


def notes(a: RunDigests, b: RunDigests, found: Bisection) -> list[str]:
    """Return what a reader must know of the findings, in sentences."""
    commits = environments_that_differ(a.environment, b.environment).get("commit")
    code = [] if commits is None else [f"the code of threestep differs: commits {commits[0]} and {commits[1]}"]
    return [*code, *_of_generators(found.comparison), *found.notes]


def _of_generators(comparison: Comparison) -> list[str]:
    """Return a sentence if the random generators have a part in the first difference."""
    key, first, steps = comparison.random_from, comparison.first, comparison.steps
    if key is None or (first is not None and first.compared.name == "random"):
        return []
    if first is None or key <= max(first.key, steps[0]):
        return [f"the states of the random generators differ before {_step(key)}: dropout and sampling draw from them"]
    if first.key not in steps or key != steps[steps.index(first.key) + 1]:
        return []
    return [
        f"the states of the random generators are equal before {_step(first.key)} and differ after it: one run draws "
        "more random numbers in this step, for example for dropout"
    ]


def as_json(a: RunDigests, b: RunDigests, found: Bisection) -> dict[str, Any]:
    """The same as one object."""
    first = found.comparison.first
    return {
        "runs": [str(run.folder) for run in (a, b)],
        "verdict": verdict(found),
        "may_round": list(found.comparison.of_rounding),
        "settings": {name: list(pair) for name, pair in found.settings.items()},
        "first": None
        if first is None
        else {
            "step": first.key[0],
            "update": first.key[1],
            "part": first.compared.part,
            "name": first.compared.name,
            "layer": first.compared.layer,
            "bound": first.bound,
            "before": first.before,
        },
        "drift": {
            f"{step}.{update}" if update else str(step): own for (step, update), own in found.comparison.drift.items()
        },
        "located": None if found.located is None else [vars(place) for place in found.located],
        "notes": notes(a, b, found),
        "next": advice(found),
    }
