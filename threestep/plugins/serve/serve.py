"""Serves one model through an OpenAI-compatible API on this machine: chat and text completions, whole or streamed.

    threestep serve runs/ppo/model
    curl http://127.0.0.1:8000/v1/models -H "Authorization: Bearer $KEY"

Chats use the prompt style saved with the model. The key is printed when the server starts, unless
--api_key_file or THREESTEP_API_KEY sets one. If an engine with its own server is installed, that serves; otherwise
Threestep's own loop does. Ctrl-C stops the server.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from threestep.plugins.evaluation.arguments import END_OF_ANSWER_TEXT, PROMPT_STYLE_TEXT, TEMPLATE_KWARGS_TEXT
from threestep.plugins.serve.endpoint.arguments import EndpointArguments, ServedModelFlags, key_of, serve_until_asked
from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keys import KEY_VARIABLE
from threestep.plugins.serving.ports import check_port, taking_port
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import free_port
from training.utils.base.user_files import named_object
from training.utils.data.rows.arguments import ChatArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import AUTO, flag, flag_of, settings_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import ENGINES, ServerCommand, ServerOrder, engine_class
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.arguments import ModelArguments, with_flag
from training.utils.run.program import run_program

if TYPE_CHECKING:
    from threestep.plugins.serve.endpoint.model import StyledModel

OURS = "ours"
WITH_SERVERS = tuple(name for name, entry in ENGINES.items() if entry.server is not None)
_OWN_SERVERS = f"{', '.join(WITH_SERVERS)} (its own server, started here), " if WITH_SERVERS else ""
_ROWS = 32  # of a batch, by default
_OF_ENGINES = ("rollout_engine",)


@dataclass
class ServeArguments(ServedModelFlags):
    """The model to serve, what a request leaves open, and the bounds of the server."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments, "A model folder or hub name (required); may come first, without the flag.", aliases=["--path"]
    )
    served_name: str | None = flag_of(EndpointArguments)
    engine: str = flag(
        AUTO,
        f"Engine that serves the model: {_OWN_SERVERS}{OURS} (Threestep's own loop), or {AUTO}: the first of "
        "these, if it is installed and prompts the model as in training.",
        choices=(AUTO, OURS, *WITH_SERVERS),
    )
    port: int = flag_of(EndpointArguments)
    api_key_file: str | None = flag_of(EndpointArguments)
    max_rows: int | None = flag_of(EndpointArguments)
    max_waiting: int = flag_of(EndpointArguments)
    max_body_mb: int = flag_of(EndpointArguments)
    grace_seconds: float = flag(
        20.0, "Time to finish responses in progress after the server is told to stop.", "seconds >= 0"
    )
    prompt_style: str = flag_of(ChatArguments, PROMPT_STYLE_TEXT)
    chat_template_kwargs: str | None = flag_of(ChatArguments, TEMPLATE_KWARGS_TEXT)
    end_of_conversation_token: str | None = flag_of(ChatArguments, END_OF_ANSWER_TEXT)
    max_new_tokens: int = flag_of(
        SamplingArguments, "Maximum response length for requests that set none.", topic="rollout"
    )
    temperature: float = flag_of(SamplingArguments, "Temperature for requests that set none.", topic="rollout")
    top_k: int = flag_of(
        SamplingArguments, "top_k for requests that set none; 0 samples from all tokens.", topic="rollout"
    )
    top_p: float = flag_of(
        SamplingArguments, "top_p for requests that set none; 1 samples from all tokens.", topic="rollout"
    )
    min_p: float = flag_of(
        SamplingArguments, "min_p for requests that set none; 0 samples from all tokens.", topic="rollout"
    )
    dtype: str | None = flag_of(SamplingArguments)

    @property
    def sampling(self) -> SamplingArguments:
        """Settings of drawing for what a request leaves open."""
        return settings_of(SamplingArguments, self, defaults=_OF_ENGINES)


GROUPS = (ServeArguments,)


class ServeFlags(NamedTuple):
    """All settings, in the order of GROUPS."""

    serve: ServeArguments


def main(argv: Sequence[str]) -> None:
    """Parse, load, serve."""
    flags = ServeFlags(*parse_arguments(GROUPS, with_flag(argv), __doc__ or "")).serve
    check_model_folder(flags.model_name_or_path)
    check_port("--port", flags.port)
    key, is_new = key_of(flags.api_key_file)
    found = with_own_server(flags)
    if found is None:
        serve_ours(flags, key, is_new)
    else:
        engine, opened = found
        serve_by_engine(flags, engine, opened, key, is_new=is_new)


def server_command_of(engine: str) -> Callable[[ServerOrder], ServerCommand]:
    """Return what makes the command of an engine's own server. engine: one of WITH_SERVERS."""
    place = ENGINES[engine].server
    assert place is not None, f"{engine} has no server of its own"
    return named_object(place)


def with_own_server(flags: ServeArguments) -> tuple[str, StyledModel] | None:
    """The engine whose own server is to serve, and the model as it is asked; None where Threestep's own loop serves,
    with the reason printed unless that was asked for. ThreestepError where an engine was asked for and cannot."""
    if flags.engine == OURS or not WITH_SERVERS:
        return None
    name = WITH_SERVERS[0] if flags.engine == AUTO else flags.engine
    try:
        engine_class(name).check_installed()
    except ThreestepError as missing:
        if flags.engine != AUTO:
            raise ThreestepError(str(missing).replace("--rollout_engine", "--engine")) from missing
        note(f"serving with Threestep's own loop: {name} is not installed")
        return None
    from threestep.plugins.serve.endpoint.model import open_model
    from threestep.plugins.serve.endpoint.own_server import why_not_alike

    opened = open_model(flags.model_name_or_path, flags.sampling, flags.text)
    reason = why_not_alike(opened)
    if reason is not None and flags.engine != AUTO:
        raise ThreestepError(f"--engine {name} cannot serve '{flags.model_name_or_path}': {reason}; use --engine ours")
    if reason is not None:
        note(f"serving with Threestep's own loop, not {name}: {reason}")
    return (name, opened) if reason is None else None


def announce(name: str, port: int, key: str, is_new: bool) -> None:
    """Print the address, a new key, which is not shown again, and a command line that asks."""
    question = json.dumps({"model": name, "messages": [{"role": "user", "content": "What is 2 + 3?"}]})
    print(f"serving '{name}' at http://{ADDRESS}:{port}/v1 (Ctrl-C stops it)")
    print(f"key: {key}" if is_new else "key: the one you provided")
    print(f"model id: {name}; example request with the key in {KEY_VARIABLE}:")
    print(f'curl http://{ADDRESS}:{port}/v1/chat/completions -H "Authorization: Bearer ${KEY_VARIABLE}" \\')
    print(f"    -H 'Content-Type: application/json' -d {shlex.quote(question)}", flush=True)


def serve_by_engine(flags: ServeArguments, engine: str, opened: StyledModel, key: str, *, is_new: bool) -> None:
    """Run an engine's own server until it ends. Ends this process with its code if that is not 0."""
    from threestep.plugins.serve.endpoint.own_server import run_server, template_of

    template = template_of(opened)
    assert template is not None, "`why_not_alike` has already checked"
    free = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    defaults = {name: own for name, value in free.items() if (own := getattr(flags, name)) != value}

    port = flags.port or free_port()

    def command(file: str) -> ServerCommand:
        path = flags.model_name_or_path
        order = ServerOrder(path, flags.name, ADDRESS, port, key, opened.dtype, file, defaults, flags.max_rows)
        return server_command_of(engine)(order)

    code = run_server(command, template, lambda: announce(flags.name, port, key, is_new))
    if code:
        sys.exit(code if code > 0 else 1)


def serve_ours(flags: ServeArguments, key: str, is_new: bool) -> None:
    """Serve by Threestep's own loop until the program is asked to end."""
    from threestep.plugins.serve.endpoint.batch import Batch
    from threestep.plugins.serve.endpoint.model import load_served
    from threestep.plugins.serve.endpoint.service import Service
    from threestep.plugins.serve.endpoint.web_server import EndpointServer

    model, rows = load_served(flags.model_name_or_path, flags.name, flags.sampling, flags.text), flags.max_rows or _ROWS
    batch = Batch(model.make_rows, rows, flags.max_waiting)
    service = Service(model, batch, flags.sampling, int(time.time()))
    with taking_port("--port", flags.port):
        server = EndpointServer(
            flags.port, service, key, flags.max_body_mb * 2**20, most_connections=rows + flags.max_waiting + 16
        )

    def finish() -> None:
        note(f"stopping: {batch.drawing} responses in progress or waiting, for at most {flags.grace_seconds:g} s")
        batch.close(flags.grace_seconds)

    batch.start()
    serve_until_asked(server, lambda: announce(flags.name, server.port, key, is_new), finish)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
