"""The flags of --rollout_engine vllm. Cheap to import: `--help` reaches this module. Sources: docs/vllm.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes


@dataclass
class VllmArguments:
    """Read by --rollout_engine vllm alone."""

    vllm_memory_share: float = field(
        default=0.3, metadata={"help": "GPU: share of the memory for vLLM's weights and cache together."}
    )
    vllm_cache_gib: float | None = field(
        default=None,
        metadata={"help": "GiB of key-value cache; default: on a GPU what the share leaves, on a CPU 2."},
    )
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "Neighbouring ranks that share one engine."})
    vllm_prefix_caching: bool = field(
        default=True, metadata={"help": "Compute the samples' common prompt once, in whole blocks of the cache."}
    )
    vllm_chunked_prefill: bool = field(
        default=True, metadata={"help": "GPU: mix pieces of long prompts with tokens that are being drawn."}
    )
    vllm_sleep: bool = field(
        default=True, metadata={"help": "GPU: give weights and cache back to training between rollouts."}
    )
    vllm_eager: bool = field(default=False, metadata={"help": "No CUDA graphs and no compilation; always so on a CPU."})
    vllm_check_weights: bool = field(
        default=False, metadata={"help": "Compare sums of all weights on both sides at every update, not the first."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        share, cache, parallel = self.vllm_memory_share, self.vllm_cache_gib, self.vllm_tensor_parallel_size
        mistakes.require(0 < share < 1, f"--vllm_memory_share expects a share between 0 and 1, got {share}")
        mistakes.require(cache is None or cache > 0, f"--vllm_cache_gib expects more than 0, got {cache}")
        mistakes.require(parallel >= 1, f"--vllm_tensor_parallel_size expects a whole number from 1 up, got {parallel}")
        mistakes.require(
            parallel == 1 or not self.vllm_check_weights,
            f"--vllm_check_weights reads whole weights, and --vllm_tensor_parallel_size is {parallel}; leave one out",
        )
