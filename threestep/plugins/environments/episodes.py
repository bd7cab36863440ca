"""One conversation's environment as a rollout runs it: calls that do not block, limits, checks, sums.

An environment's arguments and results are copied: it may change its objects, and the rollout reads its copies later.

A tool never ends a run. An environment that fails in the middle ends its conversation, counted; one that cannot begin
is a mistake in the user's code, which stops the run with one sentence.
"""

from __future__ import annotations

import inspect
import json
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

from threestep.plugins.environments.calling.calls import Caller, Outcome, bounded
from threestep.plugins.environments.interface import AssistantMessage, EnvironmentReply, Opening
from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.rollout import FAILURES

_Result = TypeVar("_Result")
OPENING_ROLES = ("system", "developer", "user", "assistant", "tool")
REPLY_ROLES = ("system", "developer", "user", "tool")
_LARGEST = 3.4028234663852886e38  # of float32
CUT, MENDED = "cut_answers", "mended_answers"


@dataclass(frozen=True)
class EpisodeSettings:
    """name: of the environment, in errors.
    make: makes the environment of one conversation.
    seconds: of one call of `reset` or `step`; None: no limit, for an environment that has one.
    characters: of one message of a reply.
    warn: is called with the sentence of each failure.
    """

    name: str
    make: Callable[[], Any]
    seconds: float | None
    characters: int
    warn: Callable[[str], None]


class Episode:
    """A conversation with an environment: `reset`, then `step` after `step`, one at a time, then `close`.

    figures: sums of the replies' figures, over the steps that are done.
    rewards: one number for each step that is done.
    """

    def __init__(self, settings: EpisodeSettings, row: Mapping[str, Any], seed: int, caller: Caller) -> None:
        self.figures: Counter[str] = Counter()
        self.rewards: list[float] = []
        self._settings = settings
        self._row = row
        self._seed = seed
        self._caller = caller
        self._environment: Any = None

    def reset(self) -> Future[Opening]:
        """Begin. The result is a ThreestepError where the environment cannot begin or begins with nonsense."""
        return _in_thread(self._reset)

    def step(self, message: AssistantMessage) -> Future[EnvironmentReply]:
        """Answer a message that the model ended itself. The future has a result in any case: where the environment
        fails, an end without messages or reward, counted as `environment_failures`."""
        handed = deepcopy(message)
        return _in_thread(lambda: self._step(handed))

    def close(self) -> None:
        """Close the environment, without waiting for it. Also for conversations that were cut, or never began."""
        if self._environment is not None:
            self._caller.start(self._environment.close)

    def _reset(self) -> Opening:
        def begin() -> Any:
            self._environment = self._settings.make()
            method = self._environment.reset
            return method(self._row, seed=self._seed) if takes_seed(method) else method(self._row)

        outcome = self._wait(begin)
        problem = _failure(outcome, self._settings.seconds)
        opening, problem = (None, problem) if problem else _checked_opening(outcome.value)
        if opening is None:
            raise ThreestepError(f"environment '{self._settings.name}': reset {problem}; fix it")
        return deepcopy(opening)

    def _step(self, message: AssistantMessage) -> EnvironmentReply:
        outcome = self._wait(lambda: self._environment.step(message))
        problem = _failure(outcome, self._settings.seconds)
        reply, problem = (None, problem) if problem else _checked_reply(outcome.value)
        if reply is not None and not _is_number(sum(self.rewards) + reply.reward):
            problem = f"must return rewards whose sum is finite in float32, got another {reply.reward!r:.60}"
            reply = None
        if reply is None:
            self._settings.warn(f"environment '{self._settings.name}': step {problem}; the conversation ends there")
            reply = EnvironmentReply([], done=True, figures={FAILURES: 1})
        reply = self._bounded(reply)
        self.figures.update(reply.figures)  # type: ignore[arg-type]  # a Counter adds numbers of any kind
        self.rewards.append(float(reply.reward))
        return reply

    def _wait(self, call: Callable[[], Any]) -> Outcome:
        return self._caller.wait(self._caller.start(call), self._settings.seconds)

    def _bounded(self, reply: EnvironmentReply) -> EnvironmentReply:
        texts = [bounded(message["content"], self._settings.characters) for message in reply.messages]
        messages = [
            {**deepcopy(message), "content": text.text} for message, text in zip(reply.messages, texts, strict=True)
        ]
        counts = {CUT: sum(text.was_cut for text in texts), MENDED: sum(text.was_mended for text in texts)}
        # An environment that counts them, as that of tools, has bounded its messages itself.
        figures = Counter({**counts, **reply.figures})
        return reply._replace(messages=messages, figures=figures)


def takes_seed(method: Callable[..., Any]) -> bool:
    """True if a `reset` has a parameter `seed`."""
    return "seed" in inspect.signature(method).parameters


def _in_thread(work: Callable[[], _Result]) -> Future[_Result]:
    answer: Future[_Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as problem:  # noqa: BLE001 - the caller's, whatever it is
            answer.set_exception(problem)

    threading.Thread(target=run, name="a step of a conversation", daemon=True).start()
    return answer


def _failure(outcome: Outcome, seconds: float | None) -> str | None:
    """The failure that gave no value, in words that follow the method's name; None if there is none."""
    if outcome.is_slow:
        return f"did not return within --environment_seconds {seconds:g}"
    if outcome.problem is None:
        return None
    frames = traceback.extract_tb(outcome.problem.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(outcome.problem).__name__}: {first_line(outcome.problem)}{place}"


def _checked_opening(value: Any) -> tuple[Opening | None, str]:
    """The opening that `reset` returned; or None and its mistake."""
    if not isinstance(value, tuple) or len(value) not in (1, 2):
        return None, f"must return (messages, tools), got {type(value).__name__}"
    opening = Opening(*value)
    problem = _messages_problem(opening.messages, OPENING_ROLES)
    if problem is None and (not opening.messages or opening.messages[-1]["role"] == "assistant"):
        problem = "must return messages that end with one for the model, got none or the assistant's"
    tools = opening.tools
    if problem is None and tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        problem = f"must return tools as a list of JSON schemas, got {tools!r:.60}"
    return (opening._replace(tools=tools or None), "") if problem is None else (None, problem)


def _checked_reply(value: Any) -> tuple[EnvironmentReply | None, str]:
    """The reply that `step` returned; or None and its mistake."""
    if not isinstance(value, tuple) or not 1 <= len(value) <= 4:
        return None, f"must return (messages, reward, done), got {type(value).__name__}"
    reply = EnvironmentReply(*value)
    problem = _messages_problem(reply.messages, REPLY_ROLES)
    if problem is None and not _is_number(reply.reward):
        problem = f"must return a reward that is finite in float32, got {reply.reward!r:.60}"
    if problem is None and not isinstance(reply.done, bool):
        problem = f"must return True or False as done, got {reply.done!r:.60}"
    if problem is None and not reply.done and not reply.messages:
        problem = "must return messages unless the conversation is done, got none"
    figures = reply.figures
    if problem is None and not (
        isinstance(figures, Mapping)
        and all(isinstance(name, str) for name in figures)
        and all(map(_is_number, figures.values()))
    ):
        problem = f"must return figures as finite numbers by name, got {figures!r:.60}"
    return (reply, "") if problem is None else (None, problem)


def _is_number(value: Any) -> bool:
    """True for a number that float32, the type of rewards, can hold."""
    try:
        return isinstance(value, Real) and abs(float(value)) <= _LARGEST
    except (OverflowError, TypeError):  # an integer that no float holds; a number that is none of its kinds
        return False


def _messages_problem(messages: Any, roles: tuple[str, ...]) -> str | None:
    if not isinstance(messages, list):
        return f"must return a list of messages, got {type(messages).__name__}"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in roles:
            return f"must return messages with a role among {', '.join(roles)}, got {message!r:.60}"
        if not isinstance(message.get("content"), str) and message["role"] != "assistant":
            return f"must return messages whose content is text, got {message!r:.60}"
        try:
            json.dumps(message)
        except (TypeError, ValueError) as problem:
            return f"must return messages that JSON can hold, got {first_line(problem)}"
    return None
