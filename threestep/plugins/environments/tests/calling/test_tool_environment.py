"""Tools answer in the order of their calls, and whatever they do is text for the model and a count."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from threestep.plugins.environments.calling.calls import Caller
from threestep.plugins.environments.calling.schemas import schema_of
from threestep.plugins.environments.calling.tool_environment import CallLimits, Tool, ToolEnvironment
from threestep.plugins.environments.interface import AssistantMessage, Call

NEVER = threading.Event()


def slow_echo(text: str, seconds: float) -> str:
    """Say it later.

    Args:
        text: What.
        seconds: When.
    """
    time.sleep(seconds)
    return text


async def async_echo(text: str) -> str:
    """Say it.

    Args:
        text: What.
    """
    await asyncio.sleep(0.001)
    return text


def fail() -> str:
    """Fail."""
    raise OSError("no disk\nsecond line")


def leave() -> str:
    """Exit."""
    raise SystemExit(1)


def hang() -> str:
    """Hang."""
    NEVER.wait()
    return "late"


def megabyte() -> str:
    """Much."""
    return "m" * 1_000_000


def broken_bytes() -> bytes:
    """Bytes."""
    return b"ok \xff\xfe"


TOOLS = [
    Tool(function, schema_of(function, "--tools"))
    for function in (slow_echo, async_echo, fail, leave, hang, megabyte, broken_bytes)
]


@pytest.fixture(scope="module")
def caller():
    made = Caller()
    yield made
    made.close()


@pytest.fixture
def environment(caller):
    made = ToolEnvironment(TOOLS, CallLimits(seconds=0.3, characters=200, calls=4), caller)
    made.reset({"messages": [{"role": "user", "content": "go"}]})
    return made


def said(*calls: Call, problems: tuple[str, ...] = ()) -> AssistantMessage:
    return AssistantMessage("", "", calls=calls, problems=problems)


def test_it_opens_with_the_rows_messages_and_ends_without_a_call(environment):
    prompt = [{"role": "user", "content": "go"}]
    opening = environment.reset({"messages": prompt})
    assert opening.messages == prompt and opening.messages is not prompt
    assert [tool["function"]["name"] for tool in opening.tools][:2] == ["slow_echo", "async_echo"]
    reply = environment.step(AssistantMessage("4", "4"))
    assert (reply.messages, reply.reward, reply.done) == ([], 0.0, True)
    assert not any(reply.figures.values())


def test_a_tool_may_change_its_arguments(caller):
    """Also where a parser gave one object to two calls."""

    def empty(items: list[str]) -> str:
        """Take all.

        Args:
            items: What.
        """
        taken = " ".join(items)
        items.clear()
        return taken

    made = ToolEnvironment([Tool(empty, schema_of(empty, "--tools"))], CallLimits(5.0, 200, 4), caller)
    arguments = {"items": ["a", "b"]}
    reply = made.step(said(Call("empty", arguments), Call("empty", arguments)))
    assert [message["content"] for message in reply.messages] == ["a b", "a b"] and arguments == {"items": ["a", "b"]}


def test_parallel_calls_run_at_once_and_keep_their_order(environment):
    calls = [Call("slow_echo", {"text": str(wait), "seconds": wait}) for wait in (0.2, 0.1, 0.15)]
    begin = time.monotonic()
    reply = environment.step(said(*calls, Call("async_echo", {"text": "last"})))
    assert time.monotonic() - begin < 0.45
    assert [message["content"] for message in reply.messages] == ["0.2", "0.1", "0.15", "last"]
    assert {message["role"] for message in reply.messages} == {"tool"} and not reply.done
    assert reply.messages[3]["name"] == "async_echo" and reply.figures["calls"] == 4
    assert 0.1 < reply.figures["tool_seconds"] < 0.45


@pytest.mark.parametrize(
    ("call", "text", "figure"),
    [
        (Call("fail", {}), "Error: OSError: no disk", "failed_calls"),
        (Call("leave", {}), "Error: SystemExit: 1", "failed_calls"),
        (Call("hang", {}), "Error: no answer within 0.3 seconds", "slow_calls"),
        (Call("async_eco", {"text": "a"}), "Error: there is no tool 'async_eco'; the tools are slow_echo, async_echo, "
         "fail, leave, hang, megabyte, broken_bytes; did you mean", "unknown_calls"),
        (Call("async_echo", {"text": 3}), "Error: argument 'text': expected string, got 3", "failed_calls"),
        (Call("async_echo", {}), "Error: argument 'text' is missing", "failed_calls"),
        (Call("megabyte", {}), "mmm", "cut_answers"),
        (Call("broken_bytes", {}), "ok \ufffd\ufffd", "mended_answers"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_text_and_a_figure(environment, call, text, figure):
    reply = environment.step(said(call))
    (message,) = reply.messages
    assert message.get("name") == (call.name if figure != "unknown_calls" else None)
    assert message["content"].startswith(text[:190]) and len(message["content"]) <= 200
    assert not reply.done and reply.reward == 0.0
    counted = {name: value for name, value in reply.figures.items() if value and name != "tool_seconds"}
    assert counted == {"calls": 1, figure: 1}
    assert environment.step(said(Call("async_echo", {"text": "go on"}))).messages[0]["content"] == "go on"


def test_calls_beyond_the_limit_and_malformed_ones_are_answered_and_counted(environment):
    echo = Call("async_echo", {"text": "a"})
    reply = environment.step(said(*[echo] * 6, problems=("the tool call could not be read: x",) * 50))
    texts = [message["content"] for message in reply.messages]
    assert texts[:4] == ["a"] * 4 and len(set(texts[4:6])) == 1 and "may have 4 calls at most" in texts[4]
    assert texts[6:] == ["Error: the tool call could not be read: x"] * 4
    assert (reply.figures["refused_calls"], reply.figures["malformed_calls"], reply.figures["calls"]) == (2, 50, 6)
    assert [message.get("name") for message in reply.messages] == ["async_echo"] * 6 + [None] * 4
