"""The call of a reward function: its arguments for each row, and checks of its result."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from training.utils.base.alarms import RefusedAlarm, TimeIsUp
from training.utils.base.errors import ThreestepError

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
    """Return an error that names what `rule` raised, where, and for which sample.

    A rule is called with a whole batch. To find the sample, the rule is called with one sample after the other; the
    first that raises the same exception type is named.
    """
    culprit = f"{len(batch)} samples at once, the first of them {batch.sample(0)}"
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
        if not isinstance(number, Real) or not abs(cast(Any, number)) <= _LARGEST:
            raise ThreestepError(
                f"{source}: expected a number that is finite in float32, got {number!r:.60} for {batch.sample(index)}"
            )
    return [math.nan if number is None else float(number) for number in numbers]


def _plain(number: Any) -> Any:
    """A number of Python for one of numpy or torch without dimensions."""
    return number.item() if getattr(number, "shape", None) == () and hasattr(number, "item") else number
