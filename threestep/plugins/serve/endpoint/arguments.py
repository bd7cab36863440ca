"""Flags that servers of models share, with the key and the end of a server. Cheap to import for `--help`."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.evaluation.arguments import OF_TRAINING
from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keys import KEY_VARIABLE, given_key
from training.utils.data.rows.arguments import ChatArguments
from training.utils.flags.flags import flag, settings_of

if TYPE_CHECKING:
    from threestep.plugins.serving.keyed import KeyedServer
    from training.utils.base.errors import Mistakes

_KEY_BYTES = 24


@dataclass
class EndpointArguments:
    """A server: its port, its key, and what it takes."""

    topic: ClassVar[str] = "task"

    served_name: str | None = flag(None, "Model name that clients send; default: the path or name you passed.", "name")
    port: int = flag(8000, "Port on 127.0.0.1; 0 picks a free one.", "0 <= port <= 65535")
    api_key_file: str | None = flag(
        None,
            f"File with the API key that requests must send; default: the key in {KEY_VARIABLE} if set, else a new "
            "key, which is printed.",
        "file",
    )  # fmt: skip
    host: str = flag(
        ADDRESS,
        "Address to listen on: 127.0.0.1 accepts requests from this machine only; 0.0.0.0 or another of its "
        "addresses also accepts requests from other machines, but without encryption.",
        "address",
    )
    max_rows: int | None = flag(
        None,
        "Number of responses to generate together; default: 32, or the engine's default.",
        "responses >= 1",
    )
    max_waiting: int = flag(
        256, "Number of responses that may wait to be generated; further requests are refused.", "responses >= 1"
    )
    max_body_mb: int = flag(4, "Largest request body.", "MB >= 1")


class ServedModelFlags:
    """The model of a server's flags."""

    model_name_or_path: str
    served_name: str | None

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.model_name_or_path), "expected a model, got none; put MODEL before the flags")
        self.text.validate(mistakes)

    @property
    def text(self) -> ChatArguments:
        """The settings by which messages become text."""
        return settings_of(ChatArguments, self, defaults=OF_TRAINING)

    @property
    def name(self) -> str:
        """The name by which requests ask for the model."""
        return self.model_name_or_path if self.served_name is None else self.served_name


def key_of(file: str | None) -> tuple[str, bool]:
    """The key, and whether it is a new one. ThreestepError for a file that cannot be read, and a key that no header can
    have."""
    key = given_key(file, KEY_VARIABLE, "--api_key_file")
    if key is None:
        return f"sk-{secrets.token_hex(_KEY_BYTES)}", True
    return key, False


def serve_until_asked(server: KeyedServer, announce: Callable[[], None], finish: Callable[[], None]) -> None:
    """Serve until the program is asked to end; the second time it ends at once.

    announce: once requests are taken. finish: once it is to end, while requests still are.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _end(ending))
    threading.Thread(target=server.serve_forever, name="serving", daemon=True).start()
    announce()
    ending.wait()
    finish()
    server.shutdown()
    server.close_when_quiet()


def _end(ending: threading.Event) -> None:
    """Ask the server to end; the second time, at once."""
    if ending.is_set():
        raise KeyboardInterrupt
    ending.set()
