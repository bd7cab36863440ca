"""Is the mathematical answer right, in whatever form it is written? By the package math-verify."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Sequence
from typing import Any

from training.step3_ppo.rewards.calling import Rule
from training.utils.run.errors import ThreestepError


def math_rule() -> Rule:
    """Return the rule that gives 1.0 where math-verify finds the response's answer equal to the ground truth, else 0.0.

    The work is done in a process of its own: math-verify stops an expression that takes too long (5 seconds) by a
    signal, which only a process's main thread gets, and reward functions run in threads.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ThreestepError("the reward 'math' needs the package math-verify; install it: pip install math-verify")
    pools: list[Any] = []  # made by the first call

    def math_reward(
        prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        if not pools:
            pools.append(multiprocessing.get_context("spawn").Pool(1))
        return pools[0].apply(answers_match, (list(responses), list(ground_truth)))

    return math_reward


def answers_match(responses: Sequence[str], ground_truth: Sequence[Any]) -> list[float]:
    """One number a response, as above. A truth without TeX's marks is read as TeX too; without any truth it is 0."""
    from math_verify import parse, verify

    found = []
    for response, truth in zip(responses, ground_truth, strict=True):
        text = "" if truth is None else str(truth)
        wanted = parse(text) or parse(f"${text}$")
        found.append(float(truth is not None and bool(wanted) and verify(wanted, parse(response))))
    return found
