"""Correctness of a GSM8K answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.rewards.rules.truths import number_after_mark, numbers_of


def gsm8k_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float | None]:
    """Return 1.0 if the response's answer equals the ground truth as a number, else 0.0; None where the truth holds no
    number (`numbers_of`).

    The answer is the first number after the last "####"; without that mark there is no answer
    (Cobbe et al. 2021: solutions end with "#### ANSWER"). The truth may be such a solution.
    """
    return [_score(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def _score(response: str, truth: Any) -> float | None:
    right = numbers_of(truth)
    return float(number_after_mark(response) in right) if right else None
