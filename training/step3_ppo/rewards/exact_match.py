"""Is the response the ground truth, to the character?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float]:
    """Return 1.0 where the response equals the ground truth, or one of a list of them, else 0.0. White space at both
    ends does not count; a number is compared as its text."""
    return [float(_matches(response, truth)) for response, truth in zip(responses, ground_truth, strict=True)]


def _matches(response: str, truth: Any) -> bool:
    truths = truth if isinstance(truth, list) else [truth]
    return response.strip() in {str(own).strip() for own in truths if own is not None}
