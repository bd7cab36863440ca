"""Serves the Tinker API on this machine, so that external training loops can train LoRA adapters of one base model.

    threestep serve training runs/sft/model --output_dir runs/tinker
    TINKER_API_KEY=tml-... TINKER_BASE_URL=http://127.0.0.1:8002 python your_loop.py

Clients' state is written to --output_dir before each answer, so a killed server continues after a restart. The key
is printed when the server starts, unless --api_key_file or THREESTEP_API_KEY sets one. Ctrl-C stops the server.
More: threestep/plugins/tinker/README.md
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from threestep.plugins.serve.endpoint.arguments import EndpointArguments, key_of, serve_until_asked
from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keys import KEY_VARIABLE
from threestep.plugins.serving.ports import check_port, taking_port
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.arguments import ModelArguments, with_flag
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

KEY_BEGINNING = "tml-"  # the tinker client takes no other


@dataclass
class ServeTrainingArguments:
    """The base model, the state of clients, and the bounds of the server."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments, "A model folder or hub name (required); may come first, without the flag."
    )
    output_dir: str = flag_of(
        RunArguments, "Folder for the clients' state, checkpoints and answers.", default="runs/serve_training"
    )
    served_name: str | None = flag_of(
        EndpointArguments, "Name that clients use for the base model; default: the name or path you passed."
    )
    host: str = flag_of(EndpointArguments)
    port: int = flag_of(EndpointArguments, "Port on --host; 0 picks a free one.", default=8002)
    api_key_file: str | None = flag_of(
        EndpointArguments,
        f"File with the key that requests must send, which must begin with {KEY_BEGINNING}; default: the key in "
        f"{KEY_VARIABLE}, or a new one, which is printed.",
    )
    max_body_mb: int = flag_of(EndpointArguments, default=64)
    max_tokens_per_micro_batch: int = flag_of(
        EngineArguments,
        "Maximum number of tokens from all clients in one forward, including padding; a longer datum is computed "
        "alone.",
        default=8192,
        topic="task",
    )
    max_rows: int = flag_of(EndpointArguments, "Number of sequences to generate together.", default=32)
    max_waiting: int = flag_of(
        EndpointArguments,
        "Number of sequences that may wait to be generated; beyond that, clients are told to retry later.",
        default=4096,
    )
    full_weights: bool = flag(
        False,
        "Train all weights of the base model instead of adapters, whatever adapters a client requests. Clients "
        "then share no micro-batches, and only one client stays in memory.",
    )
    dtype: str | None = flag_of(
        SamplingArguments,
        "Precision of the base model: fp32, bf16 or fp16; default: that of the saved weights. Adapters are always "
        "fp32.",
        topic="task",
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.model_name_or_path), "expected a model, got none; put MODEL before the flags")

    @property
    def name(self) -> str:
        """The name by which clients ask for the base."""
        return self.model_name_or_path if self.served_name is None else self.served_name


GROUPS = (ServeTrainingArguments,)


class ServeTrainingFlags(NamedTuple):
    """All settings, in the order of GROUPS."""

    serve: ServeTrainingArguments


def main(argv: Sequence[str]) -> None:
    """Parse, load, serve until the program is asked to end."""
    flags = ServeTrainingFlags(*parse_arguments(GROUPS, with_flag(argv), __doc__ or "")).serve
    check_model_folder(flags.model_name_or_path)
    check_port("--port", flags.port, flags.host)
    key, is_new = training_key(flags.api_key_file)

    from training.utils.checkpoints.other_runs import only_run

    with only_run(flags.output_dir):
        _serve(flags, key, is_new)


def _serve(flags: ServeTrainingArguments, key: str, is_new: bool) -> None:
    from threestep.plugins.tinker.opening import ServerSettings, open_service
    from threestep.plugins.tinker.web import TrainingServer

    settings = ServerSettings(flags.max_tokens_per_micro_batch, flags.max_rows, flags.max_waiting, flags.full_weights)
    service, computing = open_service(
        flags.model_name_or_path, flags.name, flags.output_dir, dtype=flags.dtype, settings=settings
    )
    with taking_port("--port", flags.port):
        server = TrainingServer(flags.port, service, key, flags.max_body_mb * 2**20, address=flags.host)

    def announce() -> None:
        if flags.host != ADDRESS:
            note(
                f"warning: --host {flags.host} can be reached from other machines, and HTTP does not encrypt the "
                "key or the data"
            )
        print(f"serving '{flags.name}' at http://{flags.host}:{server.port} (Ctrl-C stops it)")
        print(f"key: {key}" if is_new else "key: the one you provided")
        print(f"TINKER_BASE_URL=http://{flags.host}:{server.port} TINKER_API_KEY=... python your_loop.py", flush=True)

    computing.start()
    serve_until_asked(server, announce, computing.close)


def training_key(file: str | None) -> tuple[str, bool]:
    """The key, and whether it is a new one. ThreestepError for one that the client would not send."""
    key, is_new = key_of(file)
    if is_new:
        return f"{KEY_BEGINNING}{secrets.token_hex(24)}", True
    if not key.startswith(KEY_BEGINNING):
        raise ThreestepError(
            f"{f'--api_key_file {file}' if file else KEY_VARIABLE} expects a key that begins with {KEY_BEGINNING}, "
            "because the tinker client sends no others; use another one"
        )
    return key, False


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
