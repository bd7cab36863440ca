"""Addresses of judges and servers in --reward entries, and their names in the log."""

from __future__ import annotations

JUDGE = "judge:"


def judge_name(address: str) -> str:
    """Return a judge's name in the log, taken from its file name."""
    return address.removeprefix(JUDGE).rpartition("/")[2].partition(".")[0] or "judge"


def server_name(address: str) -> str:
    """The name of a server's reward in the log: host and port, or that of the file."""
    place = address.removeprefix("http:") if address.startswith("http:http") else address
    if "://" not in place:
        return place.removeprefix("http:").rpartition("/")[2].partition(".")[0] or "http"
    host = place.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host) or "http"
