"""Answers to the sweep's questions, and how a failure becomes one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.base.errors import ThreestepError

RIGHT, REFUSED, WRONG, TRACEBACK = "right", "refused", "wrong", "traceback"


@dataclass(frozen=True)
class Answer:
    """question: its name, such as "rows.packed".
    verdict: RIGHT, REFUSED (by one sentence of ours), WRONG (other numbers, in silence) or TRACEBACK.
    difference: the largest from plain transformers; None where nothing was compared.
    said: the reason, in our words or in the error's.
    """

    question: str
    verdict: str
    difference: float | None = None
    said: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compared(question: str, difference: float, tolerance: float, said: str = "") -> Answer:
    """RIGHT if the difference is within the tolerance (NaN is not)."""
    return Answer(question, RIGHT if difference <= tolerance else WRONG, difference, said)


def asked(question: str, find: Callable[[], list[Answer]]) -> list[Answer]:
    """Return what `find` finds. Its errors are answers too."""
    try:
        return find()
    except ThreestepError as sentence:
        return [Answer(question, REFUSED, None, str(sentence))]
    except Exception as problem:  # noqa: BLE001 - any error of any family is an answer
        return [Answer(question, TRACEBACK, None, placed(problem))]


def placed(problem: BaseException) -> str:
    """Return an error with the line of ours that it came through last, and the line that raised it."""
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if "/training/" in frame.filename][-1:]
    places = {f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}": None for frame in (*ours, frames[-1])}
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0][:200]} ({' < '.join(places)})"
