"""Entries of --reward as text: `gsm8k:1.0`, `FILE.py:NAME`, `judge:FILE.yaml:0.5`, `http:URL`."""

from __future__ import annotations

import re

JUDGE = "judge:"
# Of http://host:8001 the last number is a port.
_ENDS_IN_PORT = re.compile(r"(?:http:)?https?://(?:\[[^\]]*\]|[^/:]*):\d+")
_WEIGHT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def split_weight(entry: str) -> tuple[str, float]:
    """Split 'NAME:WEIGHT'; 'NAME' and 'FILE.py:NAME' have weight 1."""
    address, colon, last = entry.rpartition(":")
    has_weight = colon and _WEIGHT.fullmatch(last) and not _ENDS_IN_PORT.fullmatch(entry)
    return (address, float(last)) if has_weight else (entry, 1.0)


def reward_name(entry: str) -> str:
    """The name of an entry of --reward as it is logged: without its file, its address and its weight."""
    address = split_weight(entry.strip())[0]
    if is_judge(address):
        return judge_name(address)
    return server_name(address) if is_http(address) else address.rpartition(":")[2]


def is_judge(address: str) -> bool:
    """True for an address of --reward that names a judge."""
    return address.startswith(JUDGE)


def judge_name(address: str) -> str:
    """The name of a judge in the log: that of its file."""
    return address.removeprefix(JUDGE).rpartition("/")[2].partition(".")[0] or "judge"


def is_http(address: str) -> bool:
    """True for an address of --reward that names a server."""
    return address.startswith(("http:", "https://"))


def server_name(address: str) -> str:
    """The name of a server's reward in the log: host and port, or that of the file."""
    place = address.removeprefix("http:") if address.startswith("http:http") else address
    if "://" not in place:
        return place.removeprefix("http:").rpartition("/")[2].partition(".")[0] or "http"
    host = place.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host) or "http"
