"""How a reward function is called: what it is given of each row, and what its answer must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from training.utils.data.phases import PromptRow
from training.utils.run.errors import ThreestepError

# fn(prompts, responses, **columns) -> one number a response, or (those, {name: one number a response}).
Rule = Callable[..., Any]


def reward_columns(rows: Sequence[PromptRow], names: Iterable[str] = ()) -> dict[str, list[Any]]:
    """The `**columns` of a reward function: one value a row by name, None where a row has none of that name.

    `ground_truth` (the row's reference) and `data_source` are always there, and so are `names`, the columns that any
    row of the dataset carries: which columns come does not depend on the batch.
    """
    every = dict.fromkeys(["data_source", *names, *(name for row in rows for name in row.columns)])
    carried = {name: [row.columns.get(name) for row in rows] for name in every}
    return {"ground_truth": [row.reference for row in rows], **carried}


def call_rule(
    rule: Rule, prompts: Sequence[str], responses: Sequence[str], columns: dict[str, list[Any]]
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the scores, and the values to log by name (none where the rule gives scores alone).

    Raises ThreestepError, which names the rule, for anything but one finite number a response.
    """
    answer = rule(list(prompts), list(responses), **columns)
    scores, values = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    name = getattr(rule, "__name__", str(rule))
    return (
        _numbers(scores, f"reward function '{name}'", responses),
        {key: _numbers(own, f"reward function '{name}', value '{key}'", responses) for key, own in values.items()},
    )


def _numbers(given: Any, who: str, responses: Sequence[str]) -> list[float]:
    if not isinstance(given, Iterable) or isinstance(given, (str, dict)):
        raise ThreestepError(f"{who}: expected a list of {len(responses)} numbers, got {type(given).__name__}")
    numbers = list(given)
    if len(numbers) != len(responses):
        raise ThreestepError(f"{who}: expected {len(responses)} numbers, one a response, got {len(numbers)}")
    for number, response in zip(numbers, responses, strict=True):
        if not isinstance(number, Real) or not math.isfinite(number):
            raise ThreestepError(f"{who}: expected a finite number, got {number!r} for the response {response[:80]!r}")
    return [float(number) for number in numbers]
