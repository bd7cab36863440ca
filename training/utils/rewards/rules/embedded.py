"""The embedded task's exact checker as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.data.sources.made.embedded import check


def embedded_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return the checker's score from 0 to 1 for each response."""
    return [check(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
