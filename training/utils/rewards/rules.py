"""Rewards by rule: see `rewards.table`. A reference is a text or a number, or a list of these, any of which is
right."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.utils.rewards.calling import Rule


Truth = str | int | float
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", re.ASCII)
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", **dict.fromkeys("$\\\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}")})
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
MARK = "####"


def truths_of(reference: Any) -> list[Truth]:
    """The texts and numbers of a reference; none of null, NaN (a null that pandas wrote) and objects."""
    given = reference if isinstance(reference, list) else [reference]
    return [each for each in given if isinstance(each, (str, int, float)) and each == each]  # noqa: PLR0124 - NaN


def equals(text: str, truth: Truth) -> bool:
    """True if a text is the truth, without the white space around it. A number of JSON or Parquet is equal to each
    plain decimal text of its value: 4 and 4.0 to "4" and "4.0"."""
    text = text.strip()
    if isinstance(truth, (bool, str)):
        return text == str(truth).strip()
    return text == str(truth) or (_PLAIN.fullmatch(text) is not None and Decimal(text) == Decimal(str(truth)))


def as_text(truth: Truth) -> str:
    """A truth as text; a whole number without a fraction, whatever its type."""
    is_whole = isinstance(truth, float) and math.isfinite(truth) and truth == int(truth)
    return str(int(truth)) if is_whole else str(truth)


def number_after_mark(text: str) -> Decimal | None:
    """The first number after the last "####"; None without either."""
    _, mark, tail = text.rpartition(MARK)
    return _first_number(tail) if mark else None


def numbers_of(reference: Any) -> list[Decimal]:
    """The numbers of a reference: those of JSON; of a text the one after "####", otherwise in the last \\boxed{...},
    otherwise the only one, with commas between thousands and units as in "$1,800". None of a text with several."""
    found = (
        Decimal(str(truth)) if not isinstance(truth, str) else _number_in(truth)
        for truth in truths_of(reference)
        if not isinstance(truth, bool)
    )
    return [number for number in found if number is not None and number.is_finite()]


def _number_in(text: str) -> Decimal | None:
    if MARK in text:
        return number_after_mark(text)
    boxed = _BOXED.findall(text)
    text = (boxed[-1] if boxed else text).translate(_SIGNS).strip()
    try:
        return Decimal(text.replace(",", ""))  # also 1e3
    except InvalidOperation:
        return _first_number(text) if len(_NUMBER.findall(text)) == 1 else None


def _first_number(text: str) -> Decimal | None:
    match = _NUMBER.search(text.translate(_SIGNS))
    return None if match is None else Decimal(match.group().replace(",", ""))


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
        raise ThreestepError("the reward 'regex' needs a pattern; set --reward_regex")
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
        raise ThreestepError("the reward 'length' needs a target; set --reward_length_characters")
    target = target_characters

    def length_reward(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(response) - target) / target) for response in responses]

    return length_reward


_HERE = "for the process that checks answers"


def math_rule() -> Rule:
    """Return the rule that gives 1.0 if math-verify finds the response's answer equal to the ground truth, else 0.0.

    It runs in a separate process: math-verify aborts an expression after 5 seconds by a signal, which only a main
    thread receives, and reward functions run in other threads.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ThreestepError(
            "the reward 'math' needs the package math-verify, which is not installed; run: pip install math-verify"
        )
    pools: list[Any] = []  # filled by the first call

    def math_reward(
        prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        if not pools:
            with _main_hidden():
                pools.append(multiprocessing.get_context("spawn").Pool(1))
        return pools[0].apply(answers_match, (list(responses), list(ground_truth)))

    return math_reward


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Hide the program's main module from a process that is spawned inside, which would run it: a script that calls a
    run at its top level would begin another one there. Nor does it look for Python's modules in the current folder."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    before = os.environ.setdefault("PYTHONSAFEPATH", _HERE)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if before == _HERE:
            del os.environ["PYTHONSAFEPATH"]


def answers_match(responses: Sequence[str], ground_truth: Sequence[Any]) -> list[float | None]:
    """One number per response, as above, 1.0 for any of several truths; None where none can be read. A truth is also
    tried as TeX without its $ marks, and one with GSM8K's mark is what follows it."""
    from math_verify import parse, verify

    scores: list[float | None] = []
    for response, truth in zip(responses, ground_truth, strict=True):
        texts = [as_text(each).rpartition(MARK)[2] for each in truths_of(truth)]
        wanted = [found for found in (parse(text) or parse(f"${text}$") for text in texts) if found]
        scores.append(float(any(verify(each, parse(response)) for each in wanted)) if wanted else None)
    return scores
