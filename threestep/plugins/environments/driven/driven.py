"""Environments that drive the model: a whole conversation is one call of theirs, which asks an endpoint for messages.

    from threestep.plugins.environments.driven.driven import DrivenEnvironment, Driven

    class MyAgent(DrivenEnvironment):
        async def run(self, row, base_url):            # of a client in OpenAI's form, such as openai.AsyncOpenAI
            answer = await my_agent(row["question"], base_url=base_url)
            return Driven(reward=float(answer == row["ground_truth"]))

Each request has to continue the one before: its messages, the model's answer, and what follows. So the tokens that are
trained are those that were drawn. Serves files of users.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from threestep.plugins.environments.driven.endpoint import ENDPOINT, AskedTurn, ModelLine
from threestep.plugins.environments.interface import NO_FIGURES, AssistantMessage, EnvironmentReply, Message, Opening

_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls")  # of a message, for chat templates


class Driven(NamedTuple):
    """The end of a conversation: its reward, and numbers by name."""

    reward: float = 0.0
    figures: Mapping[str, float] = NO_FIGURES


class DrivenEnvironment:
    """An environment for `--environment`; a subclass has `run`."""

    def __init__(self) -> None:
        self._line: ModelLine | None = None
        self._running: asyncio.Task[Driven] | None = None
        self._asked: AskedTurn | None = None
        self._calls = 0

    async def run(self, row: Mapping[str, Any], base_url: str) -> Driven:
        """Hold the whole conversation, and judge it. base_url: of an endpoint that answers as the model."""
        raise NotImplementedError

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin to run, and return the first request."""
        loop = asyncio.get_running_loop()
        self._line = ENDPOINT.open(loop)
        self._running = loop.create_task(self.run(row, self._line.base_url))
        asked = await self._next()
        if isinstance(asked, Driven):
            raise RuntimeError("ended without a request to the model")
        self._asked = asked
        return Opening([as_message(message) for message in asked.messages], asked.tools)

    async def step(self, message: AssistantMessage) -> EnvironmentReply:
        """Answer the request that waits, and return what the next one adds."""
        assert self._asked is not None
        before, answer = self._asked, self._answer(message)
        figures = {"calls": float(len(message.calls)), "malformed_calls": float(len(message.problems))}
        before.answer.set_result(answer)
        asked = await self._next()
        if isinstance(asked, Driven):
            return EnvironmentReply([], asked.reward, True, {**figures, **asked.figures})
        self._asked = asked
        return EnvironmentReply(added_messages([*before.messages, answer], asked.messages), figures=figures)

    def close(self) -> None:
        """Turn its requests away at once, and end what runs."""
        if self._line is not None:
            ENDPOINT.close(self._line)
            self._line.end(self._running)

    async def _next(self) -> AskedTurn | Driven:
        """The next request, or the end. Raises what `run` raises."""
        assert self._line is not None and self._running is not None
        waiting = asyncio.ensure_future(self._line.next())
        try:
            await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else self._running.result()
        finally:
            waiting.cancel()

    def _answer(self, message: AssistantMessage) -> dict[str, Any]:
        """The model's message in OpenAI's form. A call that could not be read stays text."""
        answer: dict[str, Any] = {"role": "assistant", "content": message.content if message.calls else message.text}
        if message.reasoning and not message.problems:
            answer |= {"content": message.content, "reasoning_content": message.reasoning}
        if message.calls:
            answer["tool_calls"] = [
                {
                    "id": f"call{self._calls + place:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for place, call in enumerate(message.calls, start=1)
            ]
        self._calls += len(message.calls)
        return answer


def added_messages(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of a request behind those that are known. ValueError if it does not begin with these."""
    for place, known in enumerate(before):
        if place >= len(now) or not _same(known, now[place]):
            raise ValueError(
                f"message {place + 1} ({str(known.get('role'))}) of the next request differs from the conversation "
                "so far: a conversation that is rewritten, compacted or restarted cannot be trained on"
            )
    return [as_message(message) for message in now[len(before) :]]


def _same(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    def called(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
        return [(function.get("name"), function.get("arguments")) for function in functions]

    roles = known.get("role") == now.get("role")
    return roles and text_of(known) == text_of(now) and called(known) == called(now)


def as_message(message: Mapping[str, Any]) -> Message:
    """A message of a request with the keys that chat templates read. ValueError for what is not text."""
    kept = {key: message[key] for key in _KEYS if message.get(key) is not None}
    return {**kept, "content": text_of(message)}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose parts are joined by line breaks. ValueError for a part that is no text."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    odd = [part.get("type") for part in content if part.get("type") != "text"]
    if odd:
        raise ValueError(f"expected text messages, got a part of type {odd[0]}")
    return "\n".join(str(part["text"]) for part in content)
