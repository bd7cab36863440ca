"""One rollout server over HTTP: requests with its key, and what goes wrong with them as one sentence.

The standard library's client: it follows no redirects, and takes neither proxies nor passwords from the environment, so
that the key goes to no other address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from training.utils.base.storage import parse_json

_LONGEST_FAULT = 300
_MOST_BYTES = 1 << 30  # of an answer, and of an event; what is cut is no JSON
_PASSING = {408, 425, 429, 502, 503, 504}
_SECONDS_TO_CONNECT = 10.0


class ServerFailure(Exception):
    """A request that brought no answer. is_passing: another try at the same server may bring one."""

    def __init__(self, sentence: str, is_passing: bool = False) -> None:
        super().__init__(sentence)
        self.is_passing = is_passing


@dataclass(frozen=True)
class ServerClient:
    """address: http://HOST:PORT. key: None of a server that asks for none; in no text of this class."""

    address: str
    key: str | None = field(default=None, repr=False)

    @property
    def _place(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return parts.hostname or "", parts.port or 80

    def get(self, path: str, seconds: float) -> Any:
        """Return the JSON of an answer. ServerFailure: see there."""
        with self._answer("GET", path, None, seconds) as answer:
            return _read(answer)

    def post(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """As `get`; None for an answer without JSON."""
        with self._answer("POST", path, body, seconds) as answer:
            return _read(answer)

    def events(self, path: str, body: Mapping[str, Any], seconds: float) -> Iterator[Any]:
        """Yield the JSON of each event of a streamed answer. Closed early, it ends the request at the server."""
        with self._answer("POST", path, body, seconds) as answer:
            while line := answer.readline(_MOST_BYTES):
                text = line.decode("utf-8", "replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield _json(text.removeprefix("data: "))

    def local_address(self) -> str:
        """Return this machine's address that faces the server, to which the server can connect."""
        try:
            with socket.create_connection(self._place, timeout=_SECONDS_TO_CONNECT) as connection:
                return str(connection.getsockname()[0])
        except OSError as problem:
            raise ServerFailure(_no_answer(problem), is_passing=True) from problem

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode("utf-8"), "application/json"
        connection = http.client.HTTPConnection(*self._place, timeout=min(seconds, _SECONDS_TO_CONNECT))
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(answer.status, answer.read(4096).decode("utf-8", "replace"))
            yield answer
        except TimeoutError as problem:
            raise ServerFailure(f"no answer within {seconds:g} seconds") from problem
        except (OSError, http.client.HTTPException) as problem:
            raise ServerFailure(_no_answer(problem), is_passing=True) from problem
        finally:
            connection.close()


def _no_answer(problem: Exception) -> str:
    return f"no answer ({getattr(problem, 'strerror', None) or type(problem).__name__})"


def _refused(status: int, text: str) -> ServerFailure:
    if status == 401:
        return ServerFailure("it refuses the key (VLLM_API_KEY, VLLM_API_KEY_FILE)")
    return ServerFailure(f"it answered {status}: {_fault(text)}", status in _PASSING)


def _fault(text: str) -> str:
    """Return the message in a refusal."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(text)
        found = found.get("error", found.get("detail", text))
        text = str(found["message"] if isinstance(found, dict) else found)
    return " ".join(text.split())[:_LONGEST_FAULT] or "nothing"


def _read(answer: http.client.HTTPResponse) -> Any:
    text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    return _json(text) if text.strip() else None


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as problem:
        raise ServerFailure(f"its answer is not JSON: {text[:60]!r}") from problem
