"""Runs reward functions in threads while the models' forwards continue.

Threads suffice: forwards release Python's lock, and slow functions wait for a service or a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import gathered, largest
from training.utils.rewards.calling.calling import Rule, RuleAnswer, RuleBatch, call_rule, raised, rule_batch

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow


class RunningRule:
    """One reward function applied to one batch. Creating the object starts it."""

    def __init__(self, name: str, rule: Rule, batch: RuleBatch, is_complete: bool = False) -> None:
        self.name, self._is_complete = name, is_complete
        self._rule = rule
        self._batch = batch
        self._problem: BaseException | None = None
        self._answer: Future[RuleAnswer] = Future()
        self._started = time.monotonic()
        # A daemon thread: a function that never returns must not keep the program alive.
        threading.Thread(target=self._run, name=f"reward {name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer.set_result(call_rule(self.name, self._rule, self._batch, self._is_complete))
        except ThreestepError as problem:
            self._answer.set_exception(problem)
        except BaseException as problem:  # noqa: BLE001 - also SystemExit, which would end this thread silently
            self._problem = problem
            self._answer.set_exception(raised(self.name, self._rule, self._batch, problem))

    def collect(self, timeout_seconds: float) -> RuleAnswer:
        """Wait until `timeout_seconds` after the start at most; return the scores and the values to log.

        Raises ThreestepError where `call_rule` does, for the function's exceptions, and on timeout.
        """
        left = self._started + timeout_seconds - time.monotonic()
        try:
            return self._answer.result(max(left, 0.0))
        except FutureTimeout:
            if self._problem is not None:  # time ran out while looking for the sample that failed
                raise raised(self.name, self._rule, self._batch, self._problem, look=False) from None
            raise ThreestepError(
                f"reward function '{self.name}' did not return within --reward_timeout {timeout_seconds:g} seconds "
                f"for {len(self._batch)} samples, the first of them {self._batch.sample(0)}; give it more time or "
                "fewer samples per rollout"
            ) from None


def start_rules(
    rules: dict[str, Rule],
    rows: Sequence[PromptRow],
    responses: Sequence[str],
    columns: Sequence[str],
    *,
    timeout_seconds: float,
    device: torch.device,
    more: Mapping[str, list[Any]] | None = None,
    are_complete: bool = False,
) -> Callable[[], dict[str, RuleAnswer]]:
    """Start each rule in a thread; return a function that waits for all and returns each rule's answer by name. more:
    further columns, by response. are_complete: a rule that returns None for a response is a mistake

    That function is a collective unless `rules` is empty. If a rule fails on any rank, every rank raises its
    ThreestepError, so that none is left waiting.
    """
    if not rules:
        return dict
    per_prompt = len(responses) // len(rows)
    batch = rule_batch([row for row in rows for _ in range(per_prompt)], responses, columns)
    batch.columns.update(more or {})
    running = [RunningRule(name, _on_device(rule, device), batch, are_complete) for name, rule in rules.items()]

    def wait() -> dict[str, RuleAnswer]:
        answers: dict[str, RuleAnswer] = {}
        problem: str | None = None
        try:
            answers = {each.name: each.collect(timeout_seconds) for each in running}
        except ThreestepError as error:
            problem = str(error)
        if largest(int(problem is not None), device):
            raise ThreestepError(next(sentence for sentence in gathered(problem) if sentence is not None))
        return answers

    return wait


def _on_device(rule: Rule, device: torch.device) -> Rule:
    """Make this rank's GPU the current device inside the rule: a new thread starts with the default one."""
    if device.type != "cuda":
        return rule

    def placed(*texts: Sequence[str], **columns: Sequence[object]) -> object:
        torch.cuda.set_device(device)
        return rule(*texts, **columns)

    return placed
