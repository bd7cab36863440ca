"""JSON to one address and back, within bounds of time and size. Serves rewards, judges and teachers.

The standard library's client: it asks for no compression and undoes none, so what comes is as long as it is said to be.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from threestep.plugins.serving.asking.failures import FailedRequest, cut_fault, not_within
from threestep.plugins.serving.asking.settings import is_this_machine
from threestep.plugins.serving.deadlines import EndingHttp, EndingHttps
from training.utils.base.storage import parse_json

_MOST_BYTES = 64 * 2**20  # of an answer
_BLOCK_BYTES = 2**16
_FAULT_BYTES = 4096
# Errors that another request may not meet: timeouts, conflicts, too many requests, and the server's own.
_PASSING = {408, 409, 425, 429}
_WITHOUT_MONEY = "insufficient_quota"  # OpenAI's word in an answer 429


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to the address that was given, and to no other."""

    def redirect_request(self, *given: Any) -> None:
        return None


class Post:
    """Requests to addresses that begin with `url`. They follow no redirects, and no proxy is asked for this machine."""

    def __init__(self, url: str, key: str | None, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: of an answer."""
        direct = [urllib.request.ProxyHandler({})] if is_this_machine(url) else []
        self._opener = urllib.request.build_opener(_NoRedirect(), EndingHttp(), EndingHttps(), *direct)
        self._url, self._most_bytes = url, most_bytes
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def answer(self, body: Any, seconds: float, url: str | None = None) -> Any:
        """Return the JSON of the answer; FailedRequest if there is none. body: None asks with GET. url: by default the
        one that was given."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url or self._url, data, self._headers)  # noqa: S310 (its scheme is checked)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                content = _read(answer, self._most_bytes)
        except urllib.error.HTTPError as problem:
            raise _refused(problem) from problem
        except (OSError, HTTPException) as problem:
            reason = getattr(problem, "reason", problem)
            if isinstance(reason, TimeoutError):
                raise not_within(seconds) from problem
            raise FailedRequest(f"no answer from {request.full_url}: {reason}") from problem
        if len(content) > self._most_bytes:
            raise FailedRequest(f"the answer has more than {self._most_bytes:,} bytes")
        try:
            return parse_json(content)
        except ValueError as problem:
            raise FailedRequest("the answer is not JSON") from problem


def _read(answer: Any, most: int) -> bytes:
    """Return an answer's body, or a little more than `most` of it."""
    content = bytearray()
    while len(content) <= most and (block := answer.read1(_BLOCK_BYTES)):
        content += block
    return bytes(content)


def _refused(problem: urllib.error.HTTPError) -> FailedRequest:
    with problem:
        try:
            said = cut_fault(_read(problem.fp, _FAULT_BYTES)[:_FAULT_BYTES].decode("utf-8", "replace"))
        except (OSError, HTTPException):
            said = ""
    is_final = (problem.code not in _PASSING and problem.code < 500) or _WITHOUT_MONEY in said
    after = problem.headers.get("Retry-After", "")
    seconds = float(after) if after.isascii() and after.isdigit() else None
    return FailedRequest(f"the server answered {problem.code}: {said or problem.reason}", is_final, seconds)
