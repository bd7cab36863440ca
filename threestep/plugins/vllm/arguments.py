"""The flags of --rollout_engine vllm. Cheap to import for `--help`. Sources of the defaults: README.md here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

CPU_CACHE_GIB = 2.0


@dataclass
class VllmArguments:
    """Used only by --rollout_engine vllm."""

    topic: ClassVar[str] = "vllm"

    vllm_memory_share: float = flag(
        0.3, "GPU: fraction of GPU memory for vLLM's weights and cache.", "0 < share < 1", may_change=True
    )
    vllm_cache_gib: float | None = flag(
        None,
        "Size of the key-value cache in GiB; default: on a GPU, what remains of --vllm_memory_share; on a CPU, 2.",
        "gib > 0",
        may_change=True,
    )
    vllm_tensor_parallel_size: int = flag(1, "Number of neighboring ranks that share one engine.", "ranks >= 1")
    vllm_prefix_caching: bool = flag(
        True, "Compute shared prompts and earlier conversation turns only once, in whole cache blocks."
    )
    vllm_chunked_prefill: bool = flag(True, "GPU: process chunks of long prompts together with tokens being generated.")
    vllm_sleep: bool = flag(
        True, "GPU: free the memory of vLLM's weights and cache between rollouts, for training.", may_change=True
    )
    vllm_eager: bool = flag(False, "Turn off CUDA graphs and compilation; always the case on a CPU.")
    vllm_check_weights: bool = flag(
        False, "Compare checksums of all weights at every update, not just the first.", may_change=True
    )

    def validate(self, mistakes: Mistakes) -> None:
        parallel = self.vllm_tensor_parallel_size
        mistakes.require(
            parallel == 1 or not self.vllm_check_weights,
            f"--vllm_check_weights needs unsharded weights, but --vllm_tensor_parallel_size is {parallel}; leave one "
            "of them out",
        )
