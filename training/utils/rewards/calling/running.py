"""Runs reward functions in threads while the models' forwards continue.

Threads suffice: forwards release Python's lock, and slow functions wait for a service or a process. A function that
sets an alarm (SIGALRM) is called in the main thread instead, once the forwards are done: only there it has signals.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.alarms import RefusedAlarm, TimeIsUp, alarms_noted, in_main_thread, time_limit
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import gathered, largest
from training.utils.rewards.calling.calling import Rule, RuleAnswer, RuleBatch, call_rule, raised, rule_batch
from training.utils.run.program import end_without_waiting

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow


_with_alarms: dict[int, Rule] = {}  # the rules that were refused one, by their identity


class RunningRule:
    """One reward function applied to one batch. Creating the object starts it, unless it is known to set alarms."""

    def __init__(
        self, name: str, rule: Rule, batch: RuleBatch, is_complete: bool = False, *, device: torch.device | None = None
    ) -> None:
        self.name, self._is_complete = name, is_complete
        self._rule = rule
        self._batch = batch
        self._device = device
        self._problem: BaseException | None = None
        self._answer: Future[RuleAnswer] = Future()
        self._started = time.monotonic()
        if id(rule) in _with_alarms:
            self._answer.set_exception(RefusedAlarm())
            return
        # A daemon thread: a function that never returns must not keep the program alive.
        threading.Thread(target=self._run, name=f"reward {name}", daemon=True).start()

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts with the default one
        with alarms_noted(ends_call=True) as noted:
            try:
                answer, problem = self._outcome()
            except BaseException as other:  # noqa: BLE001 - of the calls that look for the sample
                answer, problem = None, other
        if noted.any:  # whatever the function made of it
            self._answer.set_exception(RefusedAlarm())
        elif problem is not None:
            self._answer.set_exception(problem)
        else:
            assert answer is not None
            self._answer.set_result(answer)

    def _outcome(self) -> tuple[RuleAnswer | None, BaseException | None]:
        try:
            return call_rule(self.name, self._rule, self._batch, self._is_complete), None
        except (ThreestepError, RefusedAlarm) as problem:
            return None, problem
        except BaseException as problem:  # noqa: BLE001 - also SystemExit, which would end this thread silently
            self._problem = problem
            return None, raised(self.name, self._rule, self._batch, problem)

    def collect(self, timeout_seconds: float) -> RuleAnswer:
        """Wait until `timeout_seconds` after the start at most, which of a function with alarms is now; return the
        scores and the values to log.

        Raises ThreestepError where `call_rule` does, for the function's exceptions, and on timeout.
        """
        left = self._started + timeout_seconds - time.monotonic()
        try:
            return self._answer.result(max(left, 0.0))
        except RefusedAlarm:
            return self._called_here(timeout_seconds)
        except FutureTimeout:
            if self._problem is not None:  # time ran out while looking for the sample that failed
                raise raised(self.name, self._rule, self._batch, self._problem, look=False) from None
            raise ThreestepError(self._late(timeout_seconds)) from None

    def _called_here(self, seconds: float) -> RuleAnswer:
        """Call the function in this thread, which must be the main one."""
        if not in_main_thread():
            raise ThreestepError(
                f"reward function '{self.name}' limits time by signals (signal.signal), which only the main thread "
                "has, and this run is in another; call the run from the main thread"
            )
        if id(self._rule) not in _with_alarms:
            _with_alarms[id(self._rule)] = self._rule
            log_on_main(
                f"reward function '{self.name}' sets alarms (signal.signal): it is called in the main thread, after "
                "the models' forwards; this batch's call was begun again"
            )
        self._problem = None
        try:
            with _plain_thread(), time_limit(seconds, lambda: end_without_waiting(self._late(seconds))):
                try:
                    return call_rule(self.name, self._rule, self._batch, self._is_complete)
                except (ThreestepError, TimeIsUp, KeyboardInterrupt):
                    raise
                except BaseException as problem:  # also SystemExit, as above
                    self._problem = problem
                    raise raised(self.name, self._rule, self._batch, problem) from problem
        except TimeIsUp:
            if self._problem is not None:
                raise raised(self.name, self._rule, self._batch, self._problem, look=False) from None
            raise ThreestepError(self._late(seconds)) from None

    def _late(self, seconds: float) -> str:
        return (
            f"reward function '{self.name}' did not return within --reward_timeout {seconds:g} seconds "
            f"for {len(self._batch)} samples, the first of them {self._batch.sample(0)}; give it more time or "
            "fewer samples per rollout"
        )


@contextmanager
def _plain_thread() -> Iterator[None]:
    """Inside, the main thread is as a new one: gradients are on, and a notebook's event loop is not seen."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        asyncio._set_running_loop(loop)


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
    running = [RunningRule(name, rule, batch, are_complete, device=device) for name, rule in rules.items()]

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
