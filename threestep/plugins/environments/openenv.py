"""Environments of OpenEnv (the package `openenv`), which run behind servers. Serves files of users:

    from threestep.plugins.environments.openenv import OpenEnvironment

    class Calendar(OpenEnvironment):              # its tools are the model's (MCP)
        url = "http://127.0.0.1:8000"

    class Coder(OpenEnvironment):                 # its actions are made of the model's messages
        url = "http://127.0.0.1:8001"

        def action(self, message):
            return {"code": message.content}

        def text(self, observation):
            return observation["stdout"]

    class Maze(OpenEnvironment):                  # a container that OpenEnv's launcher starts, and its typed client
        container = "maze-env:latest"
        client = maze_env.MazeEnv
        expected = "Say 0, 1, 2 or 3."

        def action(self, message):                # None: no action, which is answered by `expected`
            return MazeAction(action=int(message.content)) if message.content.isdigit() else None

Each conversation is a session of the server, which has to allow as many as there are at a time.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import re
import threading
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from threestep.plugins.environments.calling.calls import as_text
from threestep.plugins.environments.interface import AssistantMessage, EnvironmentReply, Message, Opening
from training.utils.base.errors import ThreestepError

_CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)$")  # of the client's RuntimeError, which has no field for it

_NOT_SAID = ("metadata", "reward", "done")  # fields of every typed observation


class _Container:
    """A container that the first conversation of this process starts, and the process's end stops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._url = ""

    def started(self, provider: Any, name: str) -> str:
        """Return the server's address. Blocks while the container starts."""
        with self._lock:
            if not self._url:
                url = provider.start_container(name)
                atexit.register(provider.stop_container)
                provider.wait_for_ready(url)
                self._url = url
        return self._url


class OpenEnvironment:
    """An environment for `--environment`: a subclass names the server by `url` or `container`, and overrides what
    differs."""

    url: ClassVar[str] = ""
    container: ClassVar[str] = ""  # of which a container is started that serves it, as "maze-env:latest"
    client: ClassVar[type | None] = None  # the environment's own, whose actions and observations are typed
    expected: ClassVar[str] = "This is not an action."
    penalty: ClassVar[float] = 0.0  # of a message without a valid action: where moves cost, nonsense must not be free
    _running: ClassVar[_Container]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._running = _Container()

    def __init__(self) -> None:
        """Raises ThreestepError without the package, an address or a container; connects to nothing."""
        try:
            generic: type = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        except ImportError as problem:
            raise ThreestepError("an OpenEnvironment needs the package openenv: pip install openenv") from problem
        if bool(self.url) == bool(self.container):
            raise ThreestepError(
                f"{type(self).__name__} needs either the address of a server as its url, or a container, got "
                f"{'both' if self.url else 'neither'}"
            )
        self._make: type = self.client or generic
        self._session: Any = None

    # For subclasses.

    def provider(self) -> Any:
        """OpenEnv's launcher of `container`: by default that of Docker on this machine."""
        return importlib.import_module("openenv.core.containers.runtime").LocalDockerProvider()

    def options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the server's `reset`: by default a seed that follows from the row, as all samples of a prompt
        must begin alike."""
        return {"seed": zlib.crc32(json.dumps([row.get("prompt"), row.get("ground_truth")]).encode())}

    def opening(self, row: Mapping[str, Any], observation: Any) -> list[Message]:
        """First messages of the conversation: by default the row's. observation: of `reset`."""
        return list(row["messages"])

    def action(self, message: AssistantMessage) -> Any:
        """The server's action for the model's message, a dict or one of the client's types; None if it is none. Unless
        overridden, the model calls the server's tools, and ends the conversation if it calls none."""
        raise NotImplementedError

    def text(self, observation: Any) -> str:
        """The part of the observation that the model reads after its action: by default all of it, as JSON.
        observation: a dict, or of the client's type."""
        shown = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
        return as_text({name: value for name, value in shown.items() if name not in _NOT_SAID})

    # For conversations.

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Open a session. ThreestepError if the server has no more."""
        url = self.url or await asyncio.to_thread(lambda: self._running.started(self.provider(), self.container))
        self._session = self._make(base_url=url)
        try:
            await self._session.connect()
            begun = await self._session.reset(**self.options(row))
        except Exception as problem:  # noqa: BLE001 - a closed connection is of another class in each version
            if _code_of(problem) != "CAPACITY_REACHED" and type(problem).__name__ != "ConnectionClosedOK":
                raise
            raise ThreestepError(
                f"the server at {url} has no session left for another conversation: it must allow as many as a "
                "rollout or an evaluation needs (max_concurrent_envs of its create_app)"
            ) from problem
        tools = None
        if self._calls_tools:
            listed = await self._session.step({"type": "list_tools"})
            tools = [_schema(tool) for tool in listed.observation["tools"]]
        return Opening(self.opening(row, begun.observation), tools)

    async def step(self, message: AssistantMessage) -> EnvironmentReply:
        """Act; of several calls each is a step of the server, in their order, as far as it is not done."""
        if not self._calls_tools:
            return await self._act(message)
        messages: list[Message] = []
        reward, done = 0.0, not (message.calls or message.problems)
        for call in message.calls:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            taken = await self._session.step(action)
            messages.append({"role": "tool", "name": call.name, "content": _result_text(taken.observation)})
            reward, done = reward + float(taken.reward or 0.0), bool(taken.done)
            if done:
                break
        messages += [{"role": "tool", "content": f"Error: {problem}"} for problem in message.problems]
        return EnvironmentReply(messages, reward, done, {"calls": len(message.calls)})

    async def _act(self, message: AssistantMessage) -> EnvironmentReply:
        """One action. What is none, or breaks the environment's own types, changes nothing and is told to the model."""
        try:
            action = self.action(message)
            if action is None:
                return self._refused(self.expected, "no_actions")
            taken = await self._session.step(action)
        except Exception as problem:  # noqa: BLE001 - pydantic's, or the client's RuntimeError
            if type(problem).__name__ != "ValidationError" and _code_of(problem) != "VALIDATION_ERROR":
                raise
            said = f"{self.expected} {_CODE.sub('', str(problem)).removeprefix('Server error: ').strip()}"
            return self._refused(said, "invalid_actions")
        following = [] if taken.done else [{"role": "user", "content": self.text(taken.observation)}]
        return EnvironmentReply(following, float(taken.reward or 0.0), bool(taken.done))

    def _refused(self, said: str, counted: str) -> EnvironmentReply:
        return EnvironmentReply([{"role": "user", "content": said}], -self.penalty, figures={counted: 1.0})

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    @property
    def _calls_tools(self) -> bool:
        return type(self).action is OpenEnvironment.action


def _code_of(problem: Exception) -> str:
    """The server's code of an error, or nothing."""
    found = _CODE.search(str(problem))
    return found[1] if found else ""


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
