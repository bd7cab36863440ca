"""Environments of OpenEnv (the package `openenv`), which run behind servers. Serves files of users:

    from training.utils.environments.openenv import OpenEnvironment

    class Calendar(OpenEnvironment):              # its tools are the model's (MCP)
        url = "http://127.0.0.1:8000"

    class Coder(OpenEnvironment):                 # its actions are made of the model's messages
        url = "http://127.0.0.1:8001"

        def action(self, message):
            return {"code": message.content}

        def text(self, observation):
            return observation["stdout"]

Each conversation is a session of the server, which has to allow as many as there are at a time.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from training.utils.base.errors import ThreestepError
from training.utils.environments.calls import as_text
from training.utils.environments.interface import AssistantMessage, EnvironmentReply, Message, Opening


class OpenEnvironment:
    """An environment for `--environment`: a subclass names the server by `url`, and overrides what differs."""

    url: ClassVar[str] = ""

    def __init__(self) -> None:
        """Raises ThreestepError without the package or a `url`; connects to nothing."""
        try:
            client: Any = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        except ImportError as problem:
            raise ThreestepError("an OpenEnvironment needs the package openenv: pip install openenv") from problem
        if not self.url:
            raise ThreestepError(f"{type(self).__name__} expects the address of a server as its url, got none")
        self._client = client(base_url=self.url)

    # For subclasses.

    def options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the server's `reset`: by default a seed that follows from the row, as all samples of a prompt
        must begin alike."""
        return {"seed": zlib.crc32(json.dumps([row.get("prompt"), row.get("ground_truth")]).encode())}

    def opening(self, row: Mapping[str, Any], observation: Mapping[str, Any]) -> list[Message]:
        """First messages of the conversation: by default the row's. observation: of `reset`."""
        return list(row["messages"])

    def action(self, message: AssistantMessage) -> dict[str, Any]:
        """The server's action for the model's message; unless overridden, the model calls the server's tools, and ends
        the conversation if it calls none."""
        raise NotImplementedError

    def text(self, observation: Mapping[str, Any]) -> str:
        """The part of the observation that the model reads after its action: by default all of it, as JSON."""
        return as_text({name: value for name, value in observation.items() if name != "metadata"})

    # For conversations.

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Open a session."""
        await self._client.connect()
        begun = await self._client.reset(**self.options(row))
        tools = None
        if self._calls_tools:
            listed = await self._client.step({"type": "list_tools"})
            tools = [_schema(tool) for tool in listed.observation["tools"]]
        return Opening(self.opening(row, begun.observation), tools)

    async def step(self, message: AssistantMessage) -> EnvironmentReply:
        """Act; of several calls each is a step of the server, in their order, as far as it is not done."""
        if not self._calls_tools:
            taken = await self._client.step(self.action(message))
            following = [] if taken.done else [{"role": "user", "content": self.text(taken.observation)}]
            return EnvironmentReply(following, float(taken.reward or 0.0), bool(taken.done))
        messages: list[Message] = []
        reward, done = 0.0, not (message.calls or message.problems)
        for call in message.calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            taken = await self._client.step(action)
            messages.append({"role": "tool", "name": call.name, "content": _result_text(taken.observation)})
            reward, done = reward + float(taken.reward or 0.0), bool(taken.done)
            if done:
                break
        messages += [{"role": "tool", "content": f"Error: {problem}"} for problem in message.problems]
        return EnvironmentReply(messages, reward, done, {"calls": len(message.calls)})

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    @property
    def _calls_tools(self) -> bool:
        return type(self).action is OpenEnvironment.action


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool["input_schema"] or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _result_text(observation: Mapping[str, Any]) -> str:
    """A tool's result, or the error of the call in its place."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"Error: {error['message']}"
    if isinstance(result, Mapping) and "data" in result:  # as MCP wraps results
        return as_text(result["data"])
    return as_text(result)
