"""The environment of `--tools`: a row's prompt, tools that are Python functions, an end where nothing is called."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from threestep.plugins.environments.calling.calls import Caller, RunningCall, as_text, bounded
from threestep.plugins.environments.calling.schemas import argument_problem
from threestep.plugins.environments.interface import AssistantMessage, Call, EnvironmentReply, Message, Opening
from training.utils.base.errors import first_line, nearest_names


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. schema: see `schemas.schema_of`."""

    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


@dataclass(frozen=True)
class CallLimits:
    """seconds: of one call.
    characters: of one answer; the middle of a longer one is left out.
    calls: of one message; those beyond are not run.
    """

    seconds: float
    characters: int
    calls: int


class _Answer(NamedTuple):
    """figure: under which an error is counted; None for a tool's answer."""

    text: str
    figure: str | None = None


class ToolEnvironment:
    """The calls of a message run at once, and are answered in the order in which they were written. A call that fails
    in any way is answered by a sentence, and counted; no tool ends the conversation."""

    def __init__(self, tools: Sequence[Tool], limits: CallLimits, caller: Caller) -> None:
        """tools: of different names; all conversations share them, so their functions run in several threads."""
        self._tools = {tool.name: tool for tool in tools}
        self._limits = limits
        self._caller = caller

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with the row's `messages`."""
        return Opening(list(row["messages"]), [tool.schema for tool in self._tools.values()])

    def step(self, message: AssistantMessage) -> EnvironmentReply:
        """Answer each call, then each call that could not be read; done where there is neither."""
        begin, room = time.monotonic(), self._limits.calls
        running = [self._start(call) for call in message.calls[:room]]
        answers = [self._answer(one) for one in running]
        refused = _Answer(f"Error: not called: a message may have at most {room} calls", "refused_calls")
        answers += [refused] * len(message.calls[room:])
        # A model that begins a call a thousand times need not read of each.
        answers += [_Answer(f"Error: {problem}") for problem in message.problems[:room]]

        texts = [bounded(answer.text, self._limits.characters) for answer in answers]
        messages: list[Message] = [{"role": "tool", "content": text.text} for text in texts]
        for one, call in zip(messages, message.calls, strict=False):  # what could not be read has no name
            if call.name in self._tools:  # any other is whatever a model writes
                one["name"] = call.name
        figures = Counter(answer.figure for answer in answers if answer.figure is not None)
        figures.update(
            calls=len(message.calls),
            malformed_calls=len(message.problems),
            cut_answers=sum(text.was_cut for text in texts),
            mended_answers=sum(text.was_mended for text in texts),
        )
        seconds = time.monotonic() - begin if running else 0.0
        return EnvironmentReply(messages, done=not messages, figures={**figures, "tool_seconds": seconds})

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, call: Call) -> RunningCall | _Answer:
        """The running call, or the answer to one that cannot run."""
        tool = self._tools.get(call.name)
        if tool is None:
            near = nearest_names(call.name[:80], self._tools)
            names = ", ".join(self._tools)
            return _Answer(f"Error: there is no tool '{call.name:.80}'; the tools are {names}{near}", "unknown_calls")
        problem = argument_problem(tool.schema, call.arguments)
        if problem is not None:
            return _Answer(f"Error: {problem}", "failed_calls")
        arguments = deepcopy(call.arguments)  # a parser of a user's may give one object to several calls
        return self._caller.start(lambda: tool.function(**arguments), as_text)

    def _answer(self, running: RunningCall | _Answer) -> _Answer:
        if isinstance(running, _Answer):
            return running
        outcome = self._caller.wait(running, self._limits.seconds)
        if outcome.is_slow:
            return _Answer(f"Error: no answer within {self._limits.seconds:g} seconds", "slow_calls")
        if outcome.problem is not None:
            kind = type(outcome.problem).__name__
            return _Answer(f"Error: {kind}: {first_line(outcome.problem)}", "failed_calls")
        return _Answer(outcome.value)
