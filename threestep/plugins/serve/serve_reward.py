"""Serves a reward model to programs over HTTP, so that one machine scores for another.

    threestep serve reward runs/reward/model
    THREESTEP_API_KEY=... threestep ppo --reward http:http://127.0.0.1:8001/v1/scores ...

Texts are read in the prompt style saved with the model; if the calling program uses the model's tokenizer,
its tokens are read exactly as generated. The server listens on this machine only unless --host is given. The key is
printed when the server starts, unless --api_key_file or THREESTEP_API_KEY sets one. Ctrl-C stops the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from threestep.plugins.evaluation.arguments import END_OF_ANSWER_TEXT, PROMPT_STYLE_TEXT, TEMPLATE_KWARGS_TEXT
from threestep.plugins.serve.endpoint.arguments import EndpointArguments, ServedModelFlags, key_of, serve_until_asked
from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.keys import KEY_VARIABLE
from threestep.plugins.serving.ports import check_port, taking_port
from training.utils.base.console import note
from training.utils.data.rows.arguments import ChatArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.arguments import ModelArguments, with_flag
from training.utils.run.program import run_program

if TYPE_CHECKING:
    pass


@dataclass
class ServeRewardArguments(ServedModelFlags):
    """The reward model to serve, and the bounds of the server."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments, "Folder or hub name of a reward model (required); may come first, without the flag."
    )
    served_name: str | None = flag_of(EndpointArguments)
    host: str = flag_of(EndpointArguments)
    port: int = flag_of(EndpointArguments, "Port on --host; 0 picks a free one.", default=8001)
    api_key_file: str | None = flag_of(EndpointArguments)
    max_body_mb: int = flag_of(EndpointArguments, default=16)
    prompt_style: str = flag_of(ChatArguments, PROMPT_STYLE_TEXT)
    chat_template_kwargs: str | None = flag_of(ChatArguments, TEMPLATE_KWARGS_TEXT)
    end_of_conversation_token: str | None = flag_of(ChatArguments, END_OF_ANSWER_TEXT)
    dtype: str | None = flag_of(SamplingArguments, "Precision of the model: fp32, bf16 or fp16; default: fp32.")


GROUPS = (ServeRewardArguments,)


class ServeRewardFlags(NamedTuple):
    """All settings, in the order of GROUPS."""

    serve: ServeRewardArguments


def main(argv: Sequence[str]) -> None:
    """Parse, load, serve until the program is asked to end."""
    flags = ServeRewardFlags(*parse_arguments(GROUPS, with_flag(argv), __doc__ or "")).serve
    check_model_folder(flags.model_name_or_path)
    check_port("--port", flags.port, flags.host)
    key, is_new = key_of(flags.api_key_file)

    from threestep.plugins.serve.endpoint.reward_server import SCORES, RewardServer, load_served_reward

    served = load_served_reward(flags.model_name_or_path, flags.name, flags.dtype, flags.text)
    with taking_port("--port", flags.port):
        server = RewardServer(flags.port, served, key, flags.max_body_mb * 2**20, address=flags.host)
    address = f"http://{flags.host}:{server.port}{SCORES}"

    def announce() -> None:
        if flags.host != ADDRESS:
            note(
                f"warning: --host {flags.host} can be reached from other machines, and HTTP does not encrypt the "
                "key or the texts"
            )
        print(f"serving '{flags.name}' at {address} (Ctrl-C stops it)")
        print(f"key: {key}" if is_new else "key: the one you provided")
        print(f"{KEY_VARIABLE}=... threestep ppo --reward http:{address} ...", flush=True)

    serve_until_asked(server, announce, finish=lambda: None)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
