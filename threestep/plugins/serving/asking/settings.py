"""The pace and the bounds of asking a service, and addresses of services."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from training.utils.base.errors import Mistakes, ThreestepError


@dataclass(frozen=True)
class AskSettings:
    """The pace and the bounds of asking.

    concurrency: requests of one rank at a time.
    retries: further requests for an answer that did not come or cannot be read, the first `pause` seconds later, then
        after twice as long, and so on up to `LONGEST_PAUSE_SECONDS`.
    seconds: that one request may take.
    most_requests, most_tokens: of the whole run, all ranks and what it resumes included; None sets no bound.
    """

    concurrency: int = 8
    retries: int = 8
    seconds: float = 60.0
    pause: float = 0.5
    most_requests: int | None = None
    most_tokens: int | None = None
    key_variable: str | None = None
    key_file: str | None = None

    def check(self, where: str, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings, which stand in `where`."""
        for name, least in (("concurrency", 1), ("retries", 0), ("most_requests", 1), ("most_tokens", 1)):
            value = getattr(self, name)
            mistakes.require(value is None or value >= least, f"{where}: {name} must be at least {least}, got {value}")
        for name in ("seconds", "pause"):
            value = getattr(self, name)
            mistakes.require(0 < value < 86400, f"{where}: {name} must be a number of seconds above 0, got {value}")
        mistakes.require(
            self.key_variable is None or self.key_file is None,
            f"{where}: key_variable and key_file both specify the key; leave one of them out",
        )


def check_url(url: str, where: str) -> None:
    """ThreestepError for what is no address of a service, and for one with a user or a password in it."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ThreestepError(f"{where} expects an address such as http://127.0.0.1:8001/v1/scores, got '{url}'")
    if parts.username is not None or parts.query:
        raise ThreestepError(
            f"{where}: the address contains a user, a password or a query; keep keys out of it, and set key_file or "
            "key_variable instead"
        )


def is_this_machine(url: str) -> bool:
    """True for an address of the loopback device, which no proxy reaches."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
