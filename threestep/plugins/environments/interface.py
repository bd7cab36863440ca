"""The interface of an environment that a user's class implements: what it receives and returns.

    class Lookup:
        def reset(self, row):              # or reset(self, row, seed); each method may be async
            return Opening([{"role": "user", "content": row["question"]}], tools=[...])

        def step(self, message):           # the model's turn
            return EnvironmentReply([{"role": "tool", "content": "42"}], reward=0.0, done=False)

        def close(self): ...

Plain tuples will do: (messages, tools) and (messages, reward, done).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]  # in OpenAI's form: role, content, ...
NO_FIGURES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Call:
    """A tool call that was read whole. arguments: JSON values by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AssistantMessage:
    """The model's message of one turn.

    text: all of it, without the token that ends a turn.
    content: without the reasoning and the calls.
    reasoning: the text before </think>, "" if there is none.
    calls: in the order in which they were written.
    problems: one sentence for each call that began and could not be read.
    """

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()


class Opening(NamedTuple):
    """The beginning of a conversation.

    messages: all before the model's first turn; the last is the user's or a tool's.
    tools: JSON schemas as chat templates take them, or None.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class EnvironmentReply(NamedTuple):
    """The reply to the model's message.

    messages: tool's, user's or system messages; none only where the conversation is done.
    reward: of this turn.
    done: whether the conversation ends here.
    figures: numbers by name, summed over the turns of a conversation.
    """

    messages: list[Message]
    reward: float = 0.0
    done: bool = False
    figures: Mapping[str, float] = NO_FIGURES


class Environment(Protocol):
    """One conversation's other side. Every sample of a prompt gets a new instance."""

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin a conversation. row: the columns of the dataset's row, `messages` (its prompt) and `ground_truth`.

        The row alone decides the beginning: the samples of one prompt are compared with each other. Later randomness
        comes from `seed`, a different integer for each sample, which is passed if the method has a parameter of that
        name.
        """

    def step(self, message: AssistantMessage) -> EnvironmentReply | Awaitable[EnvironmentReply]:
        """Answer the model's message."""

    def close(self) -> Awaitable[None] | None:
        """Free what this conversation holds; also called where it was cut."""
