"""The flags of --rollout_engine vllm_server. Cheap to import for `--help`. See threestep/plugins/vllm/servers.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from threestep.plugins.vllm.servers.addresses import listed_servers
from threestep.plugins.vllm.servers.protocol import GLOO, NCCL, TCP
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

ADAPTER, MERGED = "adapter", "merged"
WAYS = (TCP, GLOO, NCCL)


@dataclass
class VllmServerArguments:
    """Used only by --rollout_engine vllm_server."""

    topic: ClassVar[str] = "vllm"

    vllm_servers: str | None = flag(
        None,
        "Rollout servers started by scripts/serve.sh: http://HOST:PORT,... or @FILE with one a line, which is read "
        "again before each rollout, so that servers join and leave.",
        "addresses",
        may_change=True,
    )
    rollout_timeout: float = flag(
        1800.0,
        "Time that a rollout server has for a response, and for each part of taking weights; the run waits for servers "
        "as long at its start. A later one is left out, and others draw its responses.",
        "seconds > 0",
        may_change=True,
    )
    rollout_weights_folder: str | None = flag(
        None,
        "A folder that rollout servers see under the same path: weights go to them as a file there, where servers "
        "cannot connect to the training host; default: over TCP.",
        "folder",
        may_change=True,
    )
    rollout_weights_by: str | None = flag(
        None,
        "Weights go to rollout servers by this, without a folder for them; default: nccl (from GPU to GPU) to those "
        "where both ends have GPUs and one version of NCCL, otherwise tcp.",
        choices=WAYS,
        may_change=True,
    )
    rollout_lora: str | None = flag(
        None,
        "A run that trains adapters alone sends these (adapter: servers keep the weights below, and add them) "
        "or merged (all weights each time); default: adapter where that can be.",
        "name",
        may_change=True,
    )

    def validate(self, mistakes: Mistakes) -> None:
        if self.rollout_lora is not None:
            mistakes.require_one_of("--rollout_lora", self.rollout_lora, (ADAPTER, MERGED))
        mistakes.require(
            self.rollout_weights_by is None or self.rollout_weights_folder is None,
            f"--rollout_weights_by {self.rollout_weights_by} and --rollout_weights_folder are two ways of weights; "
            "leave one of them out",
        )
        if self.vllm_servers is not None:
            mistakes.note(listed_servers, self.vllm_servers)
