"""Rewards by rule on the text alone: see `rewards.table`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.rewards.rules.truths import equals, number_after_mark, numbers_of, truths_of

if TYPE_CHECKING:
    from training.utils.rewards.calling.calling import Rule

_BETWEEN = r"(?:(?!</?think>|</?answer>).)*"  # anything but one of the four tags
_FORM = re.compile(rf"\s*<think>{_BETWEEN}</think>\s*<answer>{_BETWEEN}</answer>\s*", re.DOTALL)


def exact_match_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float | None]:
    """Return 1.0 if the response equals the ground truth, or any entry of a list of truths (`equals`), else 0.0; None
    where there is no truth."""
    return [_matches(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def _matches(response: str, truth: Any) -> float | None:
    truths = truths_of(truth)
    return float(any(equals(response, each) for each in truths)) if truths else None


def gsm8k_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
) -> list[float | None]:
    """Return 1.0 if the response's answer equals the ground truth as a number, else 0.0; None where the truth holds no
    number (`numbers_of`).

    The answer is the first number after the last "####"; without that mark there is no answer
    (Cobbe et al. 2021: solutions end with "#### ANSWER"). The truth may be such a solution.
    """
    return [_agrees(response, truth) for response, truth in zip(responses, ground_truth, strict=True)]


def _agrees(response: str, truth: Any) -> float | None:
    right = numbers_of(truth)
    return float(number_after_mark(response) in right) if right else None


def format_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
    """Return 1.0 if the response consists of the two blocks, each once, and white space, else 0.0:
    the format reward of DeepSeek-R1 (DeepSeek-AI 2025, section 2.2.2, template in table 1), reasoning between <think>
    and </think>, the answer between <answer> and </answer>.

    A prompt that ends with <think>, as chat templates of reasoning models do, has already opened the first block.
    """
    opened = ["<think>" if prompt.rstrip().endswith("<think>") else "" for prompt in prompts]
    return [float(_FORM.fullmatch(tag + text) is not None) for tag, text in zip(opened, responses, strict=True)]


def regex_rule(pattern: str | None) -> Rule:
    """Return the rule that gives 1.0 if Python's `re.search` finds `pattern` in the response, else 0.0."""
    if pattern is None:
        raise ThreestepError("the reward 'regex' expects --reward_regex, got none; give a pattern")
    searched = re.compile(pattern)

    def regex_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [float(searched.search(response) is not None) for response in responses]

    return regex_reward


def length_rule(target_characters: int | None) -> Rule:
    """Return the rule max(0, 1 - |characters - target| / target): 1 at the target length, 0 for an empty response and
    from twice the target on.

    A bounded form of LCPO-Exact (Aggarwal and Welleck 2025, "L1", equation 1), which subtracts
    alpha * |target - length|. Lengths are in characters because rules see text. For tokens, use
    `--overlong_buffer_tokens`, `--missing_eos_penalty`.
    """
    if target_characters is None:
        raise ThreestepError(
            "the reward 'length' expects a target as --reward_length_characters, got none; give a number"
        )
    target = target_characters

    def length_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(response) - target) / target) for response in responses]

    return length_reward
