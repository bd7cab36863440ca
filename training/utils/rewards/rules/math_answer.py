"""Correctness of a mathematical answer in any notation, by the package math-verify."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.rewards.rules.truths import MARK, as_text, truths_of

if TYPE_CHECKING:
    from training.utils.rewards.calling.calling import Rule

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
