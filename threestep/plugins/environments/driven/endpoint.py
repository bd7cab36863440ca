"""An endpoint in OpenAI's form on this machine, behind which nobody computes: requests wait for a rollout's turns.

Each conversation has an address of its own, with 192 random bits in its path, so that its requests need no other key
and cannot reach another conversation. Nothing is read of a request to another address but its head.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keyed import KeyedHandler, KeyedServer, parsed
from threestep.plugins.serving.refusals import RefusedRequest

_KEY_BYTES = 24
_MOST_BODY_BYTES = 64 << 20
_MOST_CONNECTIONS = 4096  # of conversations, at once
_ANSWER_SECONDS = 24 * 3600.0  # the end of a conversation ends its requests, too
_ROUTE = "chat/completions"


@dataclass(frozen=True, eq=False)
class AskedTurn:
    """A request for a message. messages, tools: as they came, in OpenAI's form. answer: takes the message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class ModelLine:
    """The requests of one conversation, in an event loop. base_url: for a client of OpenAI's form."""

    def __init__(self, base_url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url = base_url
        self._loop = loop
        self._queue: asyncio.Queue[AskedTurn] = asyncio.Queue()
        self._waiting: set[AskedTurn] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    async def next(self) -> AskedTurn:
        """Wait for the next request."""
        return await self._queue.get()

    def ask(self, asked: AskedTurn) -> dict[str, Any] | None:
        """Wait for the answer to a request, in a thread of the endpoint; None where the conversation is over."""
        with self._lock:
            if self._is_closed:
                return None
            self._waiting.add(asked)
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, asked)
            return asked.answer.result()
        except (CancelledError, RuntimeError):  # closed meanwhile, or its event loop is
            return None
        finally:
            self._waiting.discard(asked)

    def close(self) -> None:
        """Turn away all that wait, and all that come later."""
        with self._lock:
            self._is_closed = True
            for asked in list(self._waiting):
                asked.answer.cancel()

    def end(self, running: asyncio.Task[Any] | None) -> None:
        """Cancel what asks, in its event loop, unless that is closed and has done so."""
        if running is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(running.cancel)


class ModelEndpoint:
    """The server of all lines of this process, which starts with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, ModelLine] = {}
        self._server: _LineServer | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> ModelLine:
        """Return a new conversation's line."""
        with self._lock:
            if self._server is None:
                self._server = _LineServer(self._lines)
                threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()
            key = secrets.token_urlsafe(_KEY_BYTES)
            line = ModelLine(f"http://{ADDRESS}:{self._server.port}/{key}/v1", loop)
            self._lines[key] = line
            return line

    def close(self, line: ModelLine) -> None:
        """Forget a line."""
        line.close()
        with self._lock:
            for key in [key for key, known in self._lines.items() if known is line]:
                del self._lines[key]


ENDPOINT = ModelEndpoint()


class _LineServer(KeyedServer):
    """Serves whoever has the address of a conversation."""

    def __init__(self, lines: Mapping[str, ModelLine]) -> None:
        super().__init__(0, _LineHandler, "", _MOST_BODY_BYTES, most_connections=_MOST_CONNECTIONS)
        self.lines = lines

    def is_key(self, given: str) -> bool:
        """True for the key of an open conversation."""
        return given in self.lines


class _LineHandler(KeyedHandler):
    server: _LineServer

    def given_key(self) -> str:
        return self.path.strip("/").partition("/")[0]

    def stranger(self) -> RefusedRequest:
        return RefusedRequest("no such conversation: it is over, or never existed", 404)

    def post(self, path: str) -> None:
        if not path.endswith(_ROUTE):
            raise RefusedRequest(f"expected POST {_ROUTE}, the only route here", 404)
        try:
            asked, streams = asked_of(parsed(self.body()))
        except (ValueError, TypeError, KeyError) as problem:
            raise RefusedRequest(f"expected a chat completions request in JSON: {problem}") from problem
        self.server.allow(self.connection, _ANSWER_SECONDS)
        line = self.server.lines.get(self.given_key())
        message = None if line is None else line.ask(asked)
        if message is None:
            raise RefusedRequest("the conversation is over", 410)
        if streams:
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks_of(message))
            return self.send_bytes(200, "text/event-stream", f"{events}data: [DONE]\n\n".encode())
        self.send(200, completion_of(message))


def asked_of(body: Any) -> tuple[AskedTurn, bool]:
    """A request's messages and tools, and whether it wants a stream. ValueError for another form."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("messages are missing")
    if body.get("n") not in (None, 1):
        raise ValueError(f"n is {body['n']}, but a conversation has one answer")
    messages = [dict(message) for message in body["messages"]]
    return AskedTurn(messages, list(body["tools"]) if body.get("tools") else None), bool(body.get("stream"))


def completion_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message as a response."""
    choice = {"index": 0, "message": dict(message), "logprobs": None, "finish_reason": _reason(message)}
    return {**_head("chat.completion"), "choices": [choice], "usage": _NO_USAGE}


def chunks_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same as the events of a stream."""
    calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    parts = [{"index": 0, "delta": delta, "finish_reason": None}]
    parts.append({"index": 0, "delta": {}, "finish_reason": _reason(message)})
    chunks = [{**_head("chat.completion.chunk"), "choices": [part]} for part in parts]
    return [*chunks, {**_head("chat.completion.chunk"), "choices": [], "usage": _NO_USAGE}]


_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": "policy"}


def _reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
