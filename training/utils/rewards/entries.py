"""Entries of --reward as text: `gsm8k:1.0`, `FILE.py:NAME`, and what plugins take, such as `http:URL`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.plugins.plugin import RewardEntry

# Entries of plugins, by the beginning of an address.
KINDS: dict[str, RewardEntry] = added("rewards", ())
FORMS = {kind.form: kind.note for kind in KINDS.values() if kind.form}  # as messages and `--help` show them
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
    kind = kind_of(address)
    return address.rpartition(":")[2] if kind is None else str(named_object(kind.name)(address))


def kind_of(address: str) -> RewardEntry | None:
    """Return the entry of a plugin for rewards that begin as an address does; None where there is none."""
    return next((kind for beginning, kind in KINDS.items() if address.startswith(beginning)), None)
