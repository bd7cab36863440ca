"""The flags that servers of models share, and the key that they ask for. Cheap to import for `--help`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import ClassVar

from training.utils.base.keys import KEY_VARIABLE, given_key
from training.utils.flags.flags import flag

_KEY_BYTES = 24


@dataclass
class EndpointArguments:
    """A server: its port, its key, and what it takes."""

    topic: ClassVar[str] = "task"

    served_name: str | None = flag(None, "Name by which requests ask for the model; default: as it was given.", "name")
    port: int = flag(8000, "Port on 127.0.0.1; 0 takes a free one.", "0 <= port <= 65535")
    api_key_file: str | None = flag(
        None, f"File with the key that requests must have; default: {KEY_VARIABLE}, or a new one, which is printed.",
        "file",
    )  # fmt: skip
    max_body_mb: int = flag(4, "Largest body of a request.", "MB >= 1")


def key_of(file: str | None) -> tuple[str, bool]:
    """The key, and whether it is a new one. ThreestepError for a file that cannot be read, and a key that no header can
    have."""
    key = given_key(file, KEY_VARIABLE, "--api_key_file")
    if key is None:
        return f"sk-{secrets.token_hex(_KEY_BYTES)}", True
    return key, False
