"""Does the response think and answer inside its tags?

The format reward of DeepSeek-R1 (DeepSeek-AI 2025, section 2.2.2, with the template of table 1): the reasoning stands
between <think> and </think>, the answer after it between <answer> and </answer>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BETWEEN = r"(?:(?!</?think>|</?answer>).)*"  # anything without another of the four tags
_FORM = re.compile(rf"\s*<think>{_BETWEEN}</think>\s*<answer>{_BETWEEN}</answer>\s*", re.DOTALL)


def format_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return 1.0 where the response is the two blocks, each once, and nothing else but white space, else 0.0.

    A prompt that ends with <think>, as chat templates of reasoning models write it, has opened the first block.
    """
    opened = ["<think>" if prompt.rstrip().endswith("<think>") else "" for prompt in prompts]
    return [float(_FORM.fullmatch(tag + text) is not None) for tag, text in zip(opened, responses, strict=True)]
