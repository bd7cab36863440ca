"""Environments of Gymnasium's interface, and OpenEnv's behind a server of the package itself."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from threestep.plugins.environments.gymnasium import GymnasiumEnvironment
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.openenv import OpenEnvironment
from threestep.plugins.environments.tests.conftest import said
from training.utils.base.errors import ThreestepError

IS_THERE = importlib.util.find_spec("openenv") is not None
needs_openenv = pytest.mark.skipif(not IS_THERE, reason="needs the package openenv")
ROW = {"messages": [{"role": "user", "content": "Go."}], "prompt": "Go.", "ground_truth": "7"}


@pytest.mark.skipif(IS_THERE, reason="needs a machine without the package openenv")
def test_without_the_package():
    with pytest.raises(ThreestepError, match="an OpenEnvironment needs the package openenv: pip install openenv"):
        OpenEnvironment()


@pytest.fixture
def served() -> Iterator[str]:
    """The address of a server with an environment that has a tool, and counts to three by actions."""
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

    with serving(create_fastapi_app(Counting, Action, Seen, max_concurrent_envs=4)) as url:
        yield url


@contextmanager
def serving(app) -> Iterator[str]:
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


class Climbing(NamedTuple):
    """An environment with types of its own, of whose server two sessions may be open."""

    url: str
    client: type
    move: type


@pytest.fixture
def climbing() -> Iterator[Climbing]:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import Field

    class Move(Action):
        by: int = Field(ge=1, le=2)

    class Height(Observation):
        height: int = 0

    class Stairs(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.height = 0

        def reset(self, seed=None, episode_id=None):
            self.height = 0
            return Height(height=0, done=False, reward=0.0)

        def step(self, action, timeout_s=None, **more):
            self.height += action.by
            return Height(height=self.height, done=self.height >= 4, reward=float(action.by))

        @property
        def state(self):
            return State()

    class StairsClient(EnvClient):
        def _step_payload(self, action):
            return {"by": action.by}

        def _parse_result(self, payload):
            return StepResult(Height(**payload["observation"]), payload.get("reward"), payload.get("done", False))

        def _parse_state(self, payload):
            return State(**payload)

    with serving(create_fastapi_app(Stairs, Move, Height, max_concurrent_envs=2)) as url:
        yield Climbing(url, StairsClient, Move)


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
def test_actions_and_observations_of_the_environments_own_types(climbing):
    class Acting(OpenEnvironment):
        url, client, expected, penalty = climbing.url, climbing.client, "Say 1 or 2.", 0.5

        def action(self, message):
            return climbing.move(by=int(message.content)) if message.content.isdigit() else None

    async def play():
        environment = Acting()
        await environment.reset(ROW)
        replies = [await environment.step(said(text)) for text in ("2", "up", "7", "2")]
        await environment.close()
        return replies

    up, no_action, invalid, last = asyncio.run(play())
    assert up.messages == [{"role": "user", "content": '{"height": 2}'}] and up.reward == 2
    assert no_action.messages[0]["content"] == "Say 1 or 2." and no_action.figures == {"no_actions": 1.0}
    assert invalid.messages[0]["content"].startswith("Say 1 or 2. 1 validation error for Move")
    assert invalid.figures == {"invalid_actions": 1.0} and not invalid.done
    assert (no_action.reward, invalid.reward) == (-0.5, -0.5)
    assert (last.messages, last.reward, last.done) == ([], 2.0, True)  # neither of the two moved


@needs_openenv
def test_the_server_refuses_an_action_and_a_session_too_many(climbing):
    class Acting(OpenEnvironment):
        url = climbing.url

        def action(self, message):
            return {"by": message.content}

    async def play():
        environments = [Acting() for _ in range(3)]
        for environment in environments[:2]:
            await environment.reset(ROW)
        with pytest.raises(ThreestepError, match="has no session left for another conversation: it must allow"):
            await environments[2].reset(ROW)
        replies = [await environments[0].step(said(text)) for text in ("7", "1")]
        for environment in environments:
            await environment.close()
        return replies

    refused, moved = asyncio.run(play())
    assert refused.messages == [{"role": "user", "content": "This is not an action. Invalid message"}]
    assert refused.figures == {"invalid_actions": 1.0} and moved.reward == 1


@needs_openenv
def test_one_container_serves_all_conversations(served):
    from openenv.core.containers.runtime import ContainerProvider

    started = []

    class Running(ContainerProvider):
        """A launcher whose container runs already."""

        def start_container(self, image, port=None, env_vars=None, **more):
            started.append(image)
            return served

        def stop_container(self):
            started.append("stopped")

        def wait_for_ready(self, base_url, timeout_s=30.0):
            started.append(base_url)

    class Calling(OpenEnvironment):
        container = "counting:latest"

        def provider(self):
            return Running()

    async def play():
        openings = await asyncio.gather(*(environment.reset(ROW) for environment in both))
        for environment in both:
            await environment.close()
        return openings

    both = Calling(), Calling()
    assert started == []  # a class that is looked at starts nothing
    openings = asyncio.run(play())
    assert [opening.tools[0]["function"]["name"] for opening in openings] == ["add", "add"]
    assert started == ["counting:latest", served]


@needs_openenv
@pytest.mark.parametrize(("address", "container", "got"), [("", "", "neither"), ("http://127.0.0.1:1", "a:b", "both")])
def test_a_server_has_an_address_or_a_container(address, container, got):
    class Acting(OpenEnvironment):
        pass

    Acting.url, Acting.container = address, container
    with pytest.raises(
        ThreestepError, match=f"Acting needs either the address of a server as its url, or a container, got {got}"
    ):
        Acting()


GAME_ROW = {"messages": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}], "prompt": "Go."}


class Walk:
    """Five places in a row; the last pays."""

    def __init__(self):
        self.closed = False

    def reset(self, *, seed=None, options=None):
        self.seed, self.place = seed, (options or {}).get("place", 0)
        return self.place, {}

    def step(self, action):
        self.place += action
        return self.place, float(self.place == 4), self.place == 4, self.place < 0, {}

    def close(self):
        self.closed = True


class Walking(GymnasiumEnvironment):
    expected = "Say on or back."

    def make(self):
        self.walk = Walk()
        return self.walk

    def options(self, row):
        return {"place": 2}

    def action(self, message):
        return {"on": 1, "back": -1}.get(message.content)

    def text(self, observation):
        return f"at {observation}"


def test_a_game_to_its_end():
    game = Walking()
    opening = game.reset(GAME_ROW)
    assert opening.messages == [GAME_ROW["messages"][0], {"role": "user", "content": "Go.\n\nat 2"}]
    assert game.step(said("jump")) == ([{"role": "user", "content": "Say on or back."}], 0.0, False, {"no_actions": 1})
    assert game.step(said("on"))[:3] == ([{"role": "user", "content": "at 3"}], 0.0, False)
    assert game.step(said("on"))[:3] == ([], 1.0, True)
    game.close()
    assert game.walk.closed


def test_a_game_that_is_cut_and_a_message_without_an_action():
    class Strict(Walking):
        penalty = 0.5

    game = Strict()
    game.reset(GAME_ROW)
    assert [game.step(said(text)).reward for text in ("jump", "on", "on")] == [-0.5, 0.0, 1.0]
    game = Walking()
    game.options = lambda row: {"place": 0}
    game.reset(GAME_ROW)
    assert game.step(said("back"))[:3] == ([], 0.0, True)


def test_the_row_decides_the_seed():
    seeds = []
    for prompt in ("a", "a", "b"):
        game = Walking()
        game.reset({**GAME_ROW, "prompt": prompt})
        seeds.append(game.walk.seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_the_interface_of_old_gym_is_named():
    game = Walking()
    game.reset(GAME_ROW)
    game.walk.step = lambda action: (1, 0.0, False, {})
    with pytest.raises(TypeError, match="step must return .observation, reward, terminated, truncated, info."):
        game.step(said("on"))
    with pytest.raises(NotImplementedError, match="needs a method make"):
        GymnasiumEnvironment().reset(GAME_ROW)
    GymnasiumEnvironment().close()
