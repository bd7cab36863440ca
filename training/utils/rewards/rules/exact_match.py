"""Exact match with the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float]:
    """Return 1.0 if the response equals the ground truth, or any entry of a list of truths, else 0.0. Leading and
    trailing white space is ignored; numbers are compared as text."""
    return [float(_matches(response, truth)) for response, truth in zip(responses, ground_truth, strict=True)]


def _matches(response: str, truth: Any) -> bool:
    truths = truth if isinstance(truth, list) else [truth]
    return response.strip() in {str(right).strip() for right in truths if right is not None}
