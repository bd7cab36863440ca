"""Reward functions at work in threads of their own, while the models' forwards go on.

A thread is enough: forwards release Python's lock, and slow functions wait for a service or a process.
"""

from __future__ import annotations

import threading
import time

from training.step3_ppo.rewards.calling import Rule, RuleBatch, call_rule, raised
from training.utils.run.errors import ThreestepError


class RunningRule:
    """One reward function at one batch. It starts with the object."""

    def __init__(self, name: str, rule: Rule, batch: RuleBatch) -> None:
        self.name = name
        self._rule = rule
        self._batch = batch
        self._answer: tuple[list[float], dict[str, list[float]]] = ([], {})
        self._problem: BaseException | None = None
        self._error: ThreestepError | None = None
        self._done = threading.Event()
        self._started = time.monotonic()
        # A daemon: a function that never comes back does not keep the program from ending.
        threading.Thread(target=self._run, name=f"reward {name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._answer = call_rule(self.name, self._rule, self._batch)
        except ThreestepError as problem:
            self._error = problem
        except BaseException as problem:  # noqa: BLE001 - also SystemExit, which would end this thread in silence
            self._problem = problem
            self._error = raised(self.name, self._rule, self._batch, problem)
        finally:
            self._done.set()

    def collect(self, timeout_seconds: float) -> tuple[list[float], dict[str, list[float]]]:
        """Wait, as long as the time counted from the start lasts, and return scores and values to log.

        Raises ThreestepError: what call_rule says, what the function raised, or that its time is over.
        """
        left = self._started + timeout_seconds - time.monotonic()
        if not self._done.wait(max(left, 0.0)):
            if self._problem is not None:  # and the time ran out over looking for the sample
                raise raised(self.name, self._rule, self._batch, self._problem, look=False)
            raise ThreestepError(
                f"reward function '{self.name}' did not return within --reward_timeout {timeout_seconds:g} seconds "
                f"for {len(self._batch)} samples, the first of them {self._batch.sample(0)}; give it more time or "
                "fewer samples a rollout"
            )
        if self._error is not None:
            raise self._error
        return self._answer
