"""Calls of reward functions: their arguments for each row, checks of their results, and threads in which they run while
the models' forwards continue.

Threads suffice: forwards release Python's lock, and slow functions wait for a service or a process. A function that
sets an alarm (SIGALRM) is called in the main thread instead, once the forwards are done: only there it has signals.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch

from training.utils.base.alarms import RefusedAlarm, TimeIsUp, alarms_noted, in_main_thread, time_limit
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import gathered, largest
from training.utils.run.program import end_without_waiting

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow


# fn(prompts, responses, **columns) -> one number per response, or (those, {name: one number per response}), or as
# verl has it one {"score": number, name: number} per response.
Rule = Callable[..., Any]
RuleAnswer = tuple[list[float], dict[str, list[float]]]  # scores, and values to log by name
MESSAGES = "prompt_messages"  # a column of `--return_columns`
SHOWN_CHARACTERS = 80  # of a prompt or a response, in an error
_LARGEST = 3.4028234663852886e38  # of float32, in which scores are


def reward_columns(rows: Sequence[PromptRow], names: Iterable[str] = ()) -> dict[str, list[Any]]:
    """The `**columns` of a reward function: by name, one value per row, None where a row lacks the column.

    Always present: `ground_truth` (the row's reference), `data_source`, and `names`, the columns that any row of the
    dataset has. The set of columns therefore does not depend on the batch.
    """
    every = dict.fromkeys(["data_source", *names, *(name for row in rows for name in row.columns)])
    carried = {name: [row.columns.get(name) for row in rows] for name in every}
    return {"ground_truth": [row.reference for row in rows], **carried}


@dataclass(frozen=True)
class RuleBatch:
    """The arguments of a rule, each list with one entry per response, and the uids that errors name."""

    uids: list[str]
    prompts: list[str]
    responses: list[str]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.responses)

    def call(self, rule: Rule) -> Any:
        """Return the rule's result; that of an `async def` is awaited, in an event loop of its own. Its columns are
        copies: rules run at once, and responses share a prompt's values, as do rows."""
        columns = {name: [deepcopy(value) for value in values] for name, values in self.columns.items()}
        answer = rule(list(self.prompts), list(self.responses), **columns)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def only(self, index: int) -> RuleBatch:
        """The batch of that one sample."""
        columns = {name: [values[index]] for name, values in self.columns.items()}
        return RuleBatch([self.uids[index]], [self.prompts[index]], [self.responses[index]], columns)

    def sample(self, index: int) -> str:
        """The sample as errors name it."""
        prompt, response = self.prompts[index][:SHOWN_CHARACTERS], self.responses[index][:SHOWN_CHARACTERS]
        return f"uid {self.uids[index]}, prompt {prompt!r}, response {response!r}"


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def rule_batch(rows: Sequence[PromptRow], responses: Sequence[str], names: Iterable[str] = ()) -> RuleBatch:
    """rows: one per response. names: see `reward_columns`."""
    prompts = [row.prompt_text for row in rows]
    return RuleBatch([row.uid for row in rows], prompts, list(responses), reward_columns(rows, names))


def call_rule(name: str, rule: Rule, batch: RuleBatch, is_complete: bool = False) -> RuleAnswer:
    """Return the scores, NaN where the rule returns None (it does not apply, as TRL has it), and the values to log by
    name (none if the rule returns only scores).

    Raises ThreestepError, which names the rule and the sample at fault, for anything but one finite number per
    response, or None unless `is_complete`. The rule's exceptions pass through: see `raised`.
    """
    scores, values = _parts(batch.call(rule))
    return (
        _numbers(scores, f"reward function '{name}'", batch, may_lack=not is_complete),
        {key: _numbers(numbers, f"reward function '{name}', value '{key}'", batch) for key, numbers in values.items()},
    )


def raised(name: str, rule: Rule, batch: RuleBatch, problem: BaseException, *, look: bool = True) -> ThreestepError:
    """Return an error with the exception that `rule` raised, its place and the sample.

    A rule is called with a whole batch. To find the sample, the rule is called with one sample after the other; the
    first that raises the same exception type is named.
    """
    culprit = f"a batch of {len(batch)} samples, the first with {batch.sample(0)}"
    for index in range(len(batch) if look else 0):
        try:
            batch.only(index).call(rule)
        except BaseException as own:  # noqa: BLE001 - as the first time, also SystemExit
            if type(own) is type(problem):
                culprit = batch.sample(index)
                break
            if isinstance(own, (RefusedAlarm, TimeIsUp, KeyboardInterrupt)):
                raise
    place = traceback.extract_tb(problem.__traceback__)[-1]
    return ThreestepError(
        f"reward function '{name}' raised {type(problem).__name__}: {problem} ({place.filename}, line {place.lineno}) "
        f"for {culprit}"
    )


def _parts(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    """The scores and the values by name of a rule's answer. A tuple is both where its second entry is named values;
    otherwise it is a score for each response, as any list."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        if not isinstance(answer[0], Mapping):
            return answer[0], answer[1]
    entries = answer if isinstance(answer, (list, tuple)) else []
    if not entries or not all(isinstance(entry, Mapping) and "score" in entry for entry in entries):
        return answer, {}
    names = [name for name in entries[0] if name != "score"]
    shared = [name for name in names if all(isinstance(_plain(entry.get(name)), Real) for entry in entries)]
    return [entry["score"] for entry in entries], {name: [entry[name] for entry in entries] for name in shared}


def _numbers(given: Any, source: str, batch: RuleBatch, may_lack: bool = False) -> list[float]:
    if not isinstance(given, Iterable) or isinstance(given, (str, dict, Set)) or getattr(given, "shape", None) == ():
        raise ThreestepError(f"{source}: expected a list of {len(batch)} numbers, got {type(given).__name__}")
    numbers = [_plain(number) for number in given]
    if len(numbers) != len(batch):
        raise ThreestepError(f"{source}: expected {len(batch)} numbers, one per response, got {len(numbers)}")
    for index, number in enumerate(numbers):
        if number is None and may_lack:
            continue
        if not isinstance(number, Real) or not abs(cast("Any", number)) <= _LARGEST:
            raise ThreestepError(
                f"{source}: expected a number that is finite in float32, got {number!r:.60} for {batch.sample(index)}"
            )
    return [math.nan if number is None else float(number) for number in numbers]


def _plain(number: Any) -> Any:
    """A number of Python for one of numpy or torch without dimensions."""
    return number.item() if getattr(number, "shape", None) == () and hasattr(number, "item") else number


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
                f"reward function '{self.name}' limits time with signals (signal.signal), which work only in the "
                "main thread, but this run is in another; start the run from the main thread"
            )
        if id(self._rule) not in _with_alarms:
            _with_alarms[id(self._rule)] = self._rule
            log_on_main(
                f"reward function '{self.name}' sets alarms (signal.signal), so it is called in the main thread, after "
                "the models' forward passes; the call for this batch was restarted"
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
            f"for {len(self._batch)} samples, the first with {self._batch.sample(0)}; allow more time, or use "
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
