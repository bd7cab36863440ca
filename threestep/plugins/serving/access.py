"""Access control of a page that this machine serves to its user: readers need the token of the printed address.

A page on the loopback address is open to every user and every web page of the machine. Three checks close it:

    Host      names this machine, or a site elsewhere has its name resolved here (DNS rebinding) and reads the page
    Origin    is the page itself, where a browser sends one, or a site elsewhere sends requests in the user's name
    token     as Jupyter's: in the printed address, then in a cookie, so that it leaves the address line
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")
_TOKEN_BYTES = 24  # as Jupyter's
_LONGEST_QUERY_FIELDS = 50
# For every answer: no sniffing of types, no frame and no window of another page around it, no address given away, and
# no name looked up for a link that nobody follows (Chromium would ask for the host of every link: a text could leak).
SAFE_HEADERS = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-DNS-Prefetch-Control", "off"),
)
_NOTHING = ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that is not let in, or that comes again without its token.

    headers: besides SAFE_HEADERS
    """

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = (_NOTHING, ("Cache-Control", "no-store"))


class Door:
    """Judges requests by one token. token: by default a new one, of 192 random bits."""

    def __init__(self, token: str | None = None) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES) if token is None else token
        # Cookies are shared by all ports of a host, so each server uses a different name.
        self._cookie = "threestep_" + hashlib.sha256(self._token.encode()).hexdigest()[:12]

    def address(self, port: int) -> str:
        """The address that the user opens. It holds the token."""
        return f"http://{ADDRESS}:{port}/?token={self._token}"

    def judge(self, method: str, target: str, headers: Sequence[tuple[str, str]]) -> Refusal | None:
        """Return None for a request that may be answered. target: path and query. headers: as they came."""
        given: dict[str, list[str]] = {}
        for name, value in headers:
            given.setdefault(name.lower(), []).append(value)
        hosts = given.get("host", [])
        if len(hosts) != 1 or _name_of(hosts[0]) not in _NAMES:
            return Refusal(403, f"this page is only served to {ADDRESS}\n")
        if any(origin != f"http://{hosts[0]}" for origin in given.get("origin", [])):
            return Refusal(403, "this page does not answer requests from other sites\n")
        try:
            parts = urlsplit(target)
            query = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=_LONGEST_QUERY_FIELDS)
        except ValueError:
            return Refusal(400, "this address cannot be read\n")
        if any(name == "token" and self._is_token(value) for name, value in query):
            return self._without_token(method, parts.path, dict(query))
        if any(self._is_token(value) for value in self._cookies(given.get("cookie", []))):
            return None
        return Refusal(403, "this page needs its token; open the address that the program printed when it started\n")

    def _without_token(self, method: str, path: str, query: Mapping[str, str]) -> Refusal:
        """Send the browser to the same address without the token, which it has as a cookie from then on."""
        if method not in ("GET", "HEAD"):
            return Refusal(403, "the token belongs in the page's address\n")
        rest = urlencode({name: value for name, value in query.items() if name != "token"})
        place = "/" + path.lstrip("/\\") + (f"?{rest}" if rest else "")  # `//host/` would lead elsewhere
        # Lax, not Strict: the address may be opened from a terminal that is itself a web page.
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
        return Refusal(303, "", (*Refusal(303, "").headers, ("Location", place), ("Set-Cookie", cookie)))

    def _cookies(self, headers: Sequence[str]) -> list[str]:
        tokens = []
        for header in headers:
            try:
                cookies = SimpleCookie(header)
            except CookieError:
                continue
            if self._cookie in cookies:
                tokens.append(cookies[self._cookie].value)
        return tokens

    def _is_token(self, given: str) -> bool:
        """True for the token; takes the same time however much of it is right."""
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._token.encode())


def _name_of(host: str) -> str:
    """The name in a Host header; any port, for one may be forwarded."""
    name, colon, port = host.partition(":")
    return name if not colon or (port.isascii() and port.isdigit()) else ""
