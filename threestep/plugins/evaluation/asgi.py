"""A door before an ASGI application, such as a page of Gradio's, and bounds like those of `threaded` on those outside.

Imports uvicorn, which Gradio brings along, only where it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from threestep.plugins.serving.access import SAFE_HEADERS, Door, Refusal

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]
MOST_CONNECTIONS = 64  # that are let in, at once
MOST_STRANGERS = 1024  # at once; no thread waits for them
_CONNECTION = "connection"  # in the state of a request's scope
_ACCEPTED_TOGETHER = 256  # before any of them is read
MOST_SILENT_SECONDS = 20.0  # of a connection whose request is not there, or not whole


class GuardedApp:
    """An application behind a door. policy: the Content-Security-Policy of every answer."""

    def __init__(self, app: Any, door: Door, policy: str) -> None:
        self._app, self._door = app, door
        self.strangers: dict[Any, None] = {}  # connections that are not let in, the oldest first
        self.known: set[Any] = set()
        self._headers = [
            (name.lower().encode(), value.encode())
            for name, value in (*SAFE_HEADERS, ("Content-Security-Policy", policy))
        ]

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # the page opens no web socket
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        refusal = self._door.judge(scope["method"], f"{target}?{scope['query_string'].decode('latin-1')}", headers)
        if refusal is None and self._lets_in(scope.get("state", {}).get(_CONNECTION)):
            return await self._app(scope, receive, self._sender(send))
        refusal = refusal or Refusal(503, "this page is open in too many windows\n")
        body = refusal.text.encode()
        answered = [(name.lower().encode(), value.encode("latin-1")) for name, value in refusal.headers]
        answered += [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        answered += [(name, value) for name, value in self._headers if name != b"content-security-policy"]
        await send({"type": "http.response.start", "status": refusal.status, "headers": answered})
        await send({"type": "http.response.body", "body": body})

    def _lets_in(self, connection: Any) -> bool:
        """Count a connection among those that showed the token; False where it is too late or there are too many. None
        is one of another server."""
        if connection in self.strangers and len(self.known) < MOST_CONNECTIONS:
            del self.strangers[connection]
            self.known.add(connection)
        return connection is None or connection in self.known

    def _sender(self, send: _Send) -> _Send:
        ours = {name for name, _ in self._headers}

        async def sending(message: _Scope) -> None:
            if message["type"] == "http.response.start":
                theirs = [(name, value) for name, value in message.get("headers", []) if name.lower() not in ours]
                message = {**message, "headers": [*theirs, *self._headers]}
            await send(message)

        return sending


def server_of(app: GuardedApp) -> Any:
    """A uvicorn server, whose `run(sockets=[...])` serves until Ctrl-C.

    uvicorn bounds neither the time in which a request arrives nor (by default) the number of connections.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, _CONNECTION: transport}  # type: ignore[has-type]
            if len(app.strangers) >= MOST_STRANGERS:
                oldest = next(iter(app.strangers))
                del app.strangers[oldest]
                oldest.abort()
            app.strangers[transport] = None
            self._look_later()

        def connection_lost(self, problem: Exception | None) -> None:
            app.strangers.pop(self.transport, None)
            app.known.discard(self.transport)
            super().connection_lost(problem)

        def _look_later(self) -> None:
            asyncio.get_running_loop().call_later(MOST_SILENT_SECONDS, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()
            else:
                self._look_later()

    said = {"log_level": "error", "server_header": False, "access_log": False}  # not what strangers send
    bounds = {"http": TimedProtocol, "ws": "none", "backlog": _ACCEPTED_TOGETHER, "proxy_headers": False}
    return uvicorn.Server(uvicorn.Config(app, **bounds, **said))
