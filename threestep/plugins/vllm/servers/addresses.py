"""Addresses of rollout servers, and their key, which the environment alone names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from threestep.plugins.vllm.servers.protocol import KEY_FILE_VARIABLE, KEY_VARIABLE
from training.utils.base.errors import ThreestepError

FLAG = "--vllm_servers"
_FILE = "@"


def is_file(given: str) -> bool:
    return given.startswith(_FILE)


def listed_servers(given: str) -> list[str]:
    """Return the addresses that the flag names, or those in its file now, each once. ThreestepError for anything
    else."""
    if not is_file(given):
        found = [_checked(word.strip(), f"{FLAG} {given}") for word in given.split(",") if word.strip()]
    else:
        place = Path(given.removeprefix(_FILE))
        try:
            lines = place.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise ThreestepError(f"{FLAG} {given}: the file cannot be read ({problem}); check the path") from problem
        words = [line.partition("#")[0].strip() for line in lines]
        found = [_checked(word, f"{place} (given with {FLAG})") for word in words if word]
    if not found and not is_file(given):
        raise ThreestepError(f"{FLAG} expects http://HOST:PORT,... or @FILE, got '{given}'")
    return list(dict.fromkeys(found))


def server_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key of the servers; None without one. ThreestepError if its file cannot be read."""
    if own := environment.get(KEY_VARIABLE):
        return own
    place = environment.get(KEY_FILE_VARIABLE)
    if not place:
        return None
    try:
        key = Path(place).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ThreestepError(
            f"{KEY_FILE_VARIABLE} names a file that cannot be read: {problem}; check the path"
        ) from problem
    if not key:
        raise ThreestepError(f"{KEY_FILE_VARIABLE} names '{place}', which is empty; write the servers' key to it")
    return key


def _checked(address: str, where: str) -> str:
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    is_plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme != "http" or not parts.hostname or port is None or not is_plain:
        shown = "an address with a password" if parts.password else f"'{address}'"
        raise ThreestepError(
            f"{where} expects http://HOST:PORT for each server, got {shown}; put the key in {KEY_VARIABLE} or "
            f"{KEY_FILE_VARIABLE}"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"
