"""Correctness of a GSM8K answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def gsm8k_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float]:
    """Return 1.0 if the response's answer equals the ground truth as a number, else 0.0.

    The answer is the first number after the last "####"; without that mark there is no answer
    (Cobbe et al. 2021: solutions end with "#### ANSWER").
    """
    return [float(_equal(_answer(response), truth)) for response, truth in zip(responses, ground_truth, strict=True)]


def _answer(response: str) -> str | None:
    _, mark, tail = response.rpartition("####")
    match = _NUMBER.search(tail) if mark else None
    return match.group() if match else None


def _equal(answer: str | None, truth: Any) -> bool:
    if answer is None or truth is None:
        return False
    try:
        return Decimal(answer.replace(",", "")) == Decimal(str(truth).replace(",", ""))
    except InvalidOperation:
        return False
