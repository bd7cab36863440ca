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
        "Rollout servers started with scripts/serve.sh: http://HOST:PORT,... or @FILE with one address per line, "
        "which is read again before each rollout, so servers can join and leave.",
        "addresses",
        may_change=True,
    )
    rollout_timeout: float = flag(
        1800.0,
        "Time limit for a rollout server to generate a response, to receive each part of the weights, and to be "
        "ready when the run starts. A slower server is dropped, and the other servers generate its responses.",
        "seconds > 0",
        may_change=True,
    )
    rollout_weights_folder: str | None = flag(
        None,
        "Folder that rollout servers see at the same path, for servers that cannot connect to the training "
        "host: weights are written there as a file; default: send them over TCP.",
        "folder",
        may_change=True,
    )
    rollout_weights_by: str | None = flag(
        None,
        "How to send weights to rollout servers without writing them to disk; default: nccl (GPU to GPU) for "
        "servers where both ends have GPUs and the same version of NCCL, otherwise tcp.",
        choices=WAYS,
        may_change=True,
    )
    rollout_lora: str | None = flag(
        None,
        "When a run trains only adapters, send only the adapters (adapter: servers keep the base weights and "
        "add the adapters) or all weights, merged (merged); default: adapter where possible.",
        "name",
        may_change=True,
    )

    def validate(self, mistakes: Mistakes) -> None:
        if self.rollout_lora is not None:
            mistakes.require_one_of("--rollout_lora", self.rollout_lora, (ADAPTER, MERGED))
        mistakes.require(
            self.rollout_weights_by is None or self.rollout_weights_folder is None,
            f"--rollout_weights_by {self.rollout_weights_by} and --rollout_weights_folder both choose how to send "
            "weights; remove one of them",
        )
        if self.vllm_servers is not None:
            mistakes.note(listed_servers, self.vllm_servers)
