"""Pictures behind addresses of the web, for rows that name them, where a user allows it (`--allow_image_urls`).

A row decides which address is asked, so it must not reach what only this machine can: https alone, on its own port; a
host all of whose addresses are public, and the one that was checked is the one that is connected to, so that a second
answer of the name server changes nothing; the same for each redirect. Size and time are bounded.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin, urlsplit

from threestep.plugins.serving.deadlines import EndingTlsConnection, end_after, ending_context
from training.utils.data.formats.media import BadConversation

MOST_REDIRECTS = 3
MOST_SECONDS = 60.0  # of one picture
_WAIT_SECONDS = 20.0  # for an answer
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 2**16
_AGENT = "threestep"

Connect = Callable[[str, str], Any]  # (host, address) -> an HTTPSConnection


def fetched(url: str, most_bytes: int, where: str, connect: Connect | None = None) -> bytes:
    """The bytes behind an address. connect: makes the connection to a host's checked address; for tests.

    Raises BadConversation, which begins with `where`, for any other scheme, a host that is not public, more than
    `most_bytes`, and an answer that is none.
    """
    until = time.monotonic() + MOST_SECONDS
    for _ in range(MOST_REDIRECTS + 1):
        host, path = _parts_of(url, where)
        connection = (connect or _Pinned)(host, _public_address(host, where))
        try:
            connection.request("GET", path, headers={"User-Agent": _AGENT, "Accept": "image/*"})
            answer = connection.getresponse()
            if answer.status not in _REDIRECTS:
                return _body(answer, url, most_bytes, until, where=where)
            url = urljoin(url, answer.getheader("Location") or "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BadConversation(
                f"{where}: {url[:80]!r} cannot be fetched: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
    raise BadConversation(f"{where}: expected at most {MOST_REDIRECTS} redirects, got more, the last to {url[:80]!r}")


def _parts_of(url: str, where: str) -> tuple[str, str]:
    """The host and the path with its query."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadConversation(f"{where}: expected an address, got {url[:80]!r}: {error}") from error
    if parts.scheme != "https" or not host or port not in (None, 443) or parts.username or parts.password:
        raise BadConversation(
            f"{where}: expected an https:// URL on a public host, got {url[:80]!r}; store the image next to the data"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(sign <= " " for sign in path) or not host.isascii():
        raise BadConversation(f"{where}: expected an address with special characters percent-encoded, got {url[:80]!r}")
    return host, path


def _public_address(host: str, where: str) -> str:
    """The first address of a host, all of which are public."""
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise BadConversation(f"{where}: the host '{host}' was not found: {error}") from error
    for address in map(str, found):
        number = ipaddress.ip_address(address.partition("%")[0])
        inner = getattr(number, "ipv4_mapped", None) or number
        if not inner.is_global or inner.is_multicast:
            raise BadConversation(
                f"{where}: the host '{host}' has the address {address}, which is not public, so nothing is read from it"
            )
    return str(found[0])


def _body(answer: Any, url: str, most_bytes: int, until: float, *, where: str) -> bytes:
    if answer.status != 200:
        raise BadConversation(f"{where}: {url[:80]!r} cannot be fetched: the answer is {answer.status} {answer.reason}")
    data = b""
    while chunk := answer.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > most_bytes:
            raise BadConversation(
                f"{where}: expected an image of at most {most_bytes:,} bytes, got more from {url[:80]!r}"
            )
        if time.monotonic() > until:
            raise BadConversation(f"{where}: {url[:80]!r} took more than {MOST_SECONDS:.0f} seconds")
    return data


class _Pinned(EndingTlsConnection):
    """A connection to one address of a host, whose certificate is checked by the host's name."""

    def __init__(self, host: str, address: str) -> None:
        self._checked_context = ending_context()
        super().__init__(host, timeout=_WAIT_SECONDS, context=self._checked_context)
        self._address = address

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._checked_context.wrap_socket(plain, server_hostname=self.host)
        end_after(self.sock, MOST_SECONDS)
