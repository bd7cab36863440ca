"""An order for an engine's own server, and the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOrder:
    """model: folder or hub name. name: by which requests ask for it. key: that requests must have. dtype: torch's name.
    template: the file of the chat template. defaults: of sampling, by OpenAI's names, those that differ from drawing
    freely. most_rows: that are drawn together; None leaves it to the server."""

    model: str
    name: str
    address: str
    port: int
    key: str
    dtype: str
    template: str
    defaults: Mapping[str, float]
    most_rows: int | None


@dataclass(frozen=True)
class ServerCommand:
    """words: of the command. variables: further ones of its environment, as the key is: others can read words."""

    words: list[str]
    variables: dict[str, str]
