"""The reference page of the site: every quantity that is judged, its causes, and the format of a record.

It serves docs/site/plugins.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from threestep.plugins.audit.quantities import QUANTITIES, Cause
from threestep.plugins.audit.recording.schema import FIGURES, SETTINGS, STATES, TENSORS

_KINDS = {"i": "integers", "b": "booleans", "f": "floats"}
_TYPES = {float: "number", bool: "true, false", str: "words"}


def page() -> str:
    """Return the page in Markdown."""
    quantities = [(f"`{each.name}`", ", ".join(each.objectives), _causes(each.causes)) for each in QUANTITIES]
    tensors = [
        (f"`{name}`", ", ".join(field.axis), _KINDS[field.kind], field.meaning) for name, field in TENSORS.items()
    ]
    states = [(f"`{name}NAME`", meaning) for name, meaning in STATES.items()]
    settings = [(f"`{name}`", _values(values), meaning) for name, (values, meaning) in SETTINGS.items()]
    figures = [(f"`{name}`", meaning) for name, meaning in FIGURES.items()]
    return "\n".join(
        [
            *("# Records of steps", "", "What `threestep audit` judges, and the format that it reads.", ""),
            *("## Quantities and causes", "", *_table(("quantity", "objectives", "causes"), quantities)),
            *("## Tensors", "", "S sequences of a rank, T their tokens, V vocabulary, P pairs, K micro-batches, B"),
            *("responses of a rollout, R their drawn tokens, I images, G 3, X, N values of images.", ""),
            *_table(("tensor", "axes", "numbers", "meaning"), tensors),
            *("## State", "", *_table(("tensor", "meaning"), states)),
            *("## Settings", "", *_table(("setting", "values", "meaning"), settings)),
            *("## Figures", "", *_table(("figure", "meaning"), figures)),
        ]
    )


def _causes(causes: Iterable[Cause]) -> str:
    return "; ".join(cause.sentence for cause in causes)


def _values(values: type | tuple[str, ...]) -> str:
    return _TYPES[values] if isinstance(values, type) else ", ".join(f"`{value}`" for value in values)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]
