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
        "Rollout servers started by scripts/serve.sh: http://HOST:PORT,... or @FILE with one per line, read again "
        "before each rollout, so servers can join and leave.",
        "addresses",
        may_change=True,
    )
    rollout_timeout: float = flag(
        1800.0,
        "Time limit for a rollout server to draw a response or to take each part of the weights, and to be ready "
        "when the run starts. A slower server is dropped, and the other servers draw its responses.",
        "seconds > 0",
        may_change=True,
    )
    rollout_weights_folder: str | None = flag(
        None,
        "Folder that rollout servers see under the same path, for servers that cannot connect to the training host: "
        "weights are sent as a file there; default: over TCP.",
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
            f"--rollout_weights_by {self.rollout_weights_by} and --rollout_weights_folder are two ways to send "
            "weights; leave one of them out",
        )
        if self.vllm_servers is not None:
            mistakes.note(listed_servers, self.vllm_servers)
