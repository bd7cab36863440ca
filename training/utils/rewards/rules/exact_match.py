"""Exact match with the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.rewards.rules.truths import equals, truths_of


def exact_match_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float | None]:
    """Return 1.0 if the response equals the ground truth, or any entry of a list of truths (`equals`), else 0.0; None
    where there is no truth."""
    return [_score(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def _score(response: str, truth: Any) -> float | None:
    truths = truths_of(truth)
    return float(any(equals(response, each) for each in truths)) if truths else None
