"""Conversations by a script: the same text as every turn, up to an end or a limit, with all that came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.environments.interface import AssistantMessage, Call, EnvironmentReply, Opening
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.environments.loading import Environments

RIGHT = "the answer"  # the script that gives the row's ground truth
_LONG_CHARACTERS = 100_000
_MANY_CALLS = 64
_SECONDS = "_seconds"  # ends the names of figures that measure time

Turn = Callable[[Mapping[str, Any], Opening], AssistantMessage | None]


@dataclass
class PlayedConversation:
    """A conversation that was played.

    problems: failures of the environment, in sentences. seconds: of `reset`, then of each `step`.
    """

    script: str
    opening: Opening | None = None
    replies: list[EnvironmentReply] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return float(sum(reply.reward for reply in self.replies))

    @property
    def is_done(self) -> bool:
        return bool(self.replies) and self.replies[-1].done

    @property
    def told(self) -> str:
        """All that should repeat, as JSON: figures that measure time are left out."""
        replies = [
            [reply.messages, reply.reward, reply.done,
             {name: value for name, value in reply.figures.items() if not name.endswith(_SECONDS)}]
            for reply in self.replies
        ]  # fmt: skip
        return json.dumps([self.opening, replies, self.problems], default=float)


class Begun(NamedTuple):
    """A conversation that may go on. episode: None where `reset` failed."""

    conversation: PlayedConversation
    episode: Any
    message: AssistantMessage | None


def converse(
    environments: Environments, row: Mapping[str, Any], script: str, seed: int, *, turns: int
) -> PlayedConversation:
    """Play one conversation."""
    return side_by_side(environments, row, [script], seed, turns=turns)[0]


def side_by_side(
    environments: Environments, row: Mapping[str, Any], scripts: Sequence[str], seed: int, *, turns: int
) -> list[PlayedConversation]:
    """Play conversations in turns with each other: a step of each, then the next step of each."""
    begun = [_begin(environments, row, script, seed) for script in scripts]
    try:
        for _ in range(turns):
            for each in begun:
                if each.message is not None and not each.conversation.is_done:
                    _step(each)
    finally:
        for each in begun:
            if each.episode is not None:
                each.episode.close()
    return [each.conversation for each in begun]


def opening_of(environments: Environments, row: Mapping[str, Any], seed: int) -> PlayedConversation:
    """Begin a conversation, and end it there."""
    return converse(environments, row, next(iter(SCRIPTS)), seed, turns=0)


def _begin(environments: Environments, row: Mapping[str, Any], script: str, seed: int) -> Begun:
    conversation = PlayedConversation(script)
    episode = environments.episode(row, seed, warn=conversation.problems.append)
    if episode is None:
        raise ThreestepError("a row whose column 'environment' is empty has no environment; remove the column")
    begin = time.perf_counter()
    try:
        conversation.opening = episode.reset().result()
    except ThreestepError as problem:
        conversation.problems.append(str(problem))
        return Begun(conversation, episode, None)
    conversation.seconds.append(time.perf_counter() - begin)
    return Begun(conversation, episode, SCRIPTS[script](row, conversation.opening))


def _step(begun: Begun) -> None:
    begin = time.perf_counter()
    begun.conversation.replies.append(begun.episode.step(begun.message).result())
    begun.conversation.seconds.append(time.perf_counter() - begin)


def answer_of(row: Mapping[str, Any]) -> str | None:
    """The ground truth of a row as text; None without one."""
    truth = row.get("ground_truth")
    if truth is None or truth == "":
        return None
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)


def _text(text: str) -> AssistantMessage:
    return AssistantMessage(text, text.strip())


def _calls(calls: Sequence[Call]) -> AssistantMessage:
    shape = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    text = "\n".join(shape.format(call.name, json.dumps(call.arguments)) for call in calls)
    return AssistantMessage(text, "", calls=tuple(calls))


def _broken_call(row: Mapping[str, Any], opening: Opening) -> AssistantMessage:
    text = '<tool_call>\n{"name": "look", "argu'
    return AssistantMessage(text, "", problems=("the call was cut off: it has no end",))


def _first_tool(opening: Opening) -> str | None:
    tool = (opening.tools or [{}])[0]
    name = tool.get("function", tool).get("name")
    return None if name is None else str(name)


def _odd_arguments(row: Mapping[str, Any], opening: Opening) -> AssistantMessage | None:
    name = _first_tool(opening)
    return None if name is None else _calls([Call(name, {"no such argument": None, "": [{}]})])


def _many_calls(row: Mapping[str, Any], opening: Opening) -> AssistantMessage | None:
    name = _first_tool(opening)
    return None if name is None else _calls([Call(name, {})] * _MANY_CALLS)


def _right(row: Mapping[str, Any], opening: Opening) -> AssistantMessage | None:
    answer = answer_of(row)
    return None if answer is None else _text(answer)


# By name: the turn for a row and its opening, None where the script has none for them.
SCRIPTS: dict[str, Turn] = {
    "nothing": lambda row, opening: _text(""),
    "white space": lambda row, opening: _text(" \n\t "),
    "a word": lambda row, opening: _text("hello"),
    "a very long text": lambda row, opening: _text("la " * (_LONG_CHARACTERS // 3)),
    "odd characters": lambda row, opening: _text("\x00\x1b[2J\u202e\ufffd<|im_end|></s>{{ x }}\U0001f9ff"),
    "the prompt again": lambda row, opening: _text(str(opening.messages[-1].get("content") or "")),
    "a truncated call": _broken_call,
    "a call of an unknown tool": lambda row, opening: _calls([Call("no_such_tool", {"key": "x"})]),
    "a call with odd arguments": _odd_arguments,
    f"{_MANY_CALLS} calls at once": _many_calls,
    RIGHT: _right,
}
