"""A door before an ASGI application, such as a page of Gradio's, and a bound on clients that send nothing.

Imports uvicorn, which Gradio brings along, only where it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from training.utils.serving.door import SAFE_HEADERS, Door

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]
MOST_CONNECTIONS = 64
MOST_SILENT_SECONDS = 20.0  # of a connection whose request is not there, or not whole


class GuardedApp:
    """An application behind a door. policy: the Content-Security-Policy of every answer."""

    def __init__(self, app: Any, door: Door, policy: str) -> None:
        self._app, self._door = app, door
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
        if refusal is None:
            return await self._app(scope, receive, self._sender(send))
        body = refusal.text.encode()
        answered = [(name.lower().encode(), value.encode("latin-1")) for name, value in refusal.headers]
        answered += [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
        answered += [(name, value) for name, value in self._headers if name != b"content-security-policy"]
        await send({"type": "http.response.start", "status": refusal.status, "headers": answered})
        await send({"type": "http.response.body", "body": body})

    def _sender(self, send: _Send) -> _Send:
        ours = {name for name, _ in self._headers}

        async def sending(message: _Scope) -> None:
            if message["type"] == "http.response.start":
                theirs = [(name, value) for name, value in message.get("headers", []) if name.lower() not in ours]
                message = {**message, "headers": [*theirs, *self._headers]}
            await send(message)

        return sending


def server_of(app: Any) -> Any:
    """A uvicorn server, whose `run(sockets=[...])` serves until Ctrl-C.

    uvicorn bounds neither the time in which a request arrives nor (by default) the number of connections.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MOST_CONNECTIONS:
                transport.abort()
            self._look_later()

        def _look_later(self) -> None:
            asyncio.get_running_loop().call_later(MOST_SILENT_SECONDS, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()
            else:
                self._look_later()

    return uvicorn.Server(
        uvicorn.Config(app, http=TimedProtocol, ws="none", log_level="warning", server_header=False, access_log=False)
    )
