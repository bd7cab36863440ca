"""OpenEnv's environments behind a server of the package itself: their tools are called, their actions taken."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.environments.interface import AssistantMessage, Call
from training.utils.environments.openenv import OpenEnvironment

IS_THERE = importlib.util.find_spec("openenv") is not None
needs_openenv = pytest.mark.skipif(not IS_THERE, reason="needs the package openenv")
ROW = {"messages": [{"role": "user", "content": "Go."}], "prompt": "Go.", "ground_truth": "7"}


def said(text: str, *calls: Call, problems: tuple[str, ...] = ()) -> AssistantMessage:
    return AssistantMessage(text, text, calls=calls, problems=problems)


@pytest.mark.skipif(IS_THERE, reason="needs a machine without the package openenv")
def test_without_the_package():
    with pytest.raises(ThreestepError, match="an OpenEnvironment needs the package openenv: pip install openenv"):
        OpenEnvironment()


@pytest.fixture
def served() -> Iterator[str]:
    """The address of a server with an environment that has a tool, and counts to three by actions."""
    import uvicorn
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.types import Action, Observation, State

    class Seen(Observation):
        heard: str = ""

    class Counting(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            tools = FastMCP("tools")

            @tools.tool
            def add(a: int, b: int) -> int:
                """Add."""
                return a + b

            super().__init__(tools)
            self.seed, self.count = 0, 0

        def reset(self, seed=None, episode_id=None, **more):
            self.seed, self.count = seed, 0
            return Seen(heard=f"seed {seed}", done=False, reward=None)

        def _step_impl(self, action, timeout_s=None, **more):
            self.count += 1
            heard = f"{self.count} {action.metadata['said']}"
            return Seen(heard=heard, done=self.count == 3, reward=float(self.count))

        @property
        def state(self):
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Counting, Action, Seen, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@needs_openenv
def test_the_model_calls_the_servers_tools(served):
    class Calling(OpenEnvironment):
        url = served

    async def play():
        environment = Calling()
        opening = await environment.reset(ROW)
        add = Call("add", {"a": 3, "b": 4})
        replies = [await environment.step(said("", add, Call("gone", {}), problems=("cut",)))]
        replies.append(await environment.step(said("7")))
        await environment.close()
        return opening, replies

    opening, (called, last) = asyncio.run(play())
    (schema,) = opening.tools
    assert schema["function"]["name"] == "add" and "a" in schema["function"]["parameters"]["properties"]
    assert opening.messages == ROW["messages"]
    first, unknown, problem = called.messages
    assert first == {"role": "tool", "name": "add", "content": "7"} and unknown["content"].startswith("Error: ")
    assert problem == {"role": "tool", "content": "Error: cut"} and not called.done
    assert (last.messages, last.done) == ([], True)


@needs_openenv
def test_actions_are_made_of_what_the_model_says(served):
    class Acting(OpenEnvironment):
        url = served

        def opening(self, row, observation):
            return [{"role": "user", "content": observation["heard"]}]

        def action(self, message):
            return {"metadata": {"said": message.content}}

        def text(self, observation):
            return observation["heard"]

    async def play():
        both = Acting(), Acting()  # sessions of their own
        openings = [await environment.reset(ROW) for environment in both]
        replies = [await both[0].step(said(text)) for text in "abc"]
        other = await both[1].step(said("z"))
        for environment in both:
            await environment.close()
        return openings, replies, other

    openings, replies, other = asyncio.run(play())
    assert openings[0] == openings[1] and openings[0].messages[0]["content"].startswith("seed ")
    assert [reply.reward for reply in replies] == [1.0, 2.0, 3.0] and [reply.done for reply in replies] == [0, 0, 1]
    assert [reply.messages[0]["content"] for reply in replies[:2]] == ["1 a", "2 b"] and replies[2].messages == []
    assert other.messages[0]["content"] == "1 z"


@needs_openenv
def test_a_server_has_an_address():
    with pytest.raises(ThreestepError, match="OpenEnvironment expects the address of a server as its url, got none"):
        OpenEnvironment()
