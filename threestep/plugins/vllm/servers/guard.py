"""A key for every address of a vLLM server (`--middleware`); serves scripts/serve.sh.

vLLM's own `--api-key` guards /v1, /v2, /inference and /cohere alone; whoever reaches the port could call
/collective_rpc and change weights without it (vllm 0.32, entrypoints/serve/middleware/authenticate.py). Only /health
answers without the key.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from threestep.plugins.vllm.servers.protocol import KEY_VARIABLE

_Scope = MutableMapping[str, Any]
_OPEN = ("/health",)
_BODY = b'{"error": "this server needs its key"}'


class KeyGuard:
    """An ASGI application before another."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(
        self, scope: _Scope, receive: Callable[[], Awaitable[_Scope]], send: Callable[[_Scope], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in _OPEN):
            return await self._app(scope, receive, send)
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "http" and hmac.compare_digest(given, self._wanted):
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})
