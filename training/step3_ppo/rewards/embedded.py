"""The embedded task's own exact checker, as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.utils.data.embedded import check


def embedded_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return the checker's score of each response, from 0 to 1."""
    return [check(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
