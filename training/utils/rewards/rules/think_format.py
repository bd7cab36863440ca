"""The think-and-answer format of DeepSeek-R1.

The format reward of DeepSeek-AI 2025 (section 2.2.2, template in table 1): reasoning between <think> and </think>,
followed by the answer between <answer> and </answer>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BETWEEN = r"(?:(?!</?think>|</?answer>).)*"  # anything but one of the four tags
_FORM = re.compile(rf"\s*<think>{_BETWEEN}</think>\s*<answer>{_BETWEEN}</answer>\s*", re.DOTALL)


def format_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return 1.0 if the response consists of the two blocks, each once, and white space, else 0.0.

    A prompt that ends with <think>, as chat templates of reasoning models do, has already opened the first block.
    """
    opened = ["<think>" if prompt.rstrip().endswith("<think>") else "" for prompt in prompts]
    return [float(_FORM.fullmatch(tag + text) is not None) for tag, text in zip(opened, responses, strict=True)]
