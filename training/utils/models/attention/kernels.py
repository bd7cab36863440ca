"""Attention kernels, which plugins add (`attention_kernels` of `Plugin.tables`). Cheap to import: `--help` reaches it.

A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.base.memory import MemoryLine
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.plugins.plugin import AttentionEntry

AUTO, SDPA = "auto", "sdpa"
KERNELS: dict[str, AttentionEntry] = added("attention_kernels", (AUTO, SDPA))
# Arguments of transformers' attention functions that change the scores (transformers 5.19).
CHANGES_SCORES = ("position_bias", "s_aux", "softcap", "indices", "block_indices", "head_mask")


@dataclass(frozen=True)
class AttentionCall:
    """A model's calls of its attention.

    head_sizes: of keys and of values, the largest and the smallest of all layers; 0 if none uses transformers'
        interface.
    dropout: the largest, in train mode.
    changes: those of CHANGES_SCORES that it is given.
    """

    head_sizes: tuple[int, int]
    dropout: float
    changes: tuple[str, ...]


class AttentionKernel:
    """An attention implementation for CUDA, whose cost depends on the lengths of documents alone.

    why: words on it, for the log.
    of_transformers: transformers knows it, and loads models with it by its name.
    shares_prompts: responses that share a prompt do not see each other.
    takes_media: it computes rows one by one, so that the positions of media fit.
    """

    why: str
    of_transformers: bool
    shares_prompts: bool
    takes_media: bool

    def why_not(self, model: PreTrainedModel, call: AttentionCall) -> str | None:
        """Return None if it can compute the model's attention, else the reason. model: perhaps on the meta device."""
        return None

    def why_not_here(self) -> str | None:
        """Return None if it can be used on this machine, else the reason."""
        return None

    def use(self, model: PreTrainedModel, by_dense_mask: Callable[..., Any] | None = None) -> None:
        """Give it to a model. by_dense_mask: an attention function for rollouts, where it has none of its own."""

    def lay_out(self, rows: TokenRows, inputs: dict[str, Any]) -> bool:
        """Complete the arguments of a model's forward (`attention.model_inputs`). Return False where the mask that sdpa
        takes is to be added. ThreestepError for rows that it cannot compute."""
        raise NotImplementedError

    def why_wrong(self, model: PreTrainedModel, device: torch.device) -> str | None:
        """Return None if its numbers here are right on rows longer than any of its blocks, else how wrong they are."""
        return None

    def time_first_rows(self, reader: nn.Module, model: PreTrainedModel, log: Callable[[str], None]) -> None:
        """Have its time on the first rows that `reader` trains on noted."""

    def mask_memory(self, rows: int, tokens: int) -> list[MemoryLine]:
        """Return the memory that it takes in the place of a mask, for packed rows of that length."""
        return []


@functools.cache
def kernel_of(name: str) -> AttentionKernel | None:
    """Return the kernel of a name of --attn_implementation; None where there is none: sdpa, or the model's own."""
    kernel: AttentionKernel | None = named_object(KERNELS[name].place)() if name in KERNELS else None
    return kernel


def auto_kernels() -> Iterator[tuple[str, AttentionKernel]]:
    """Yield the name and the kernel of each that --attn_implementation auto tries, in its order."""
    for name, entry in KERNELS.items():
        if entry.by_auto and (kernel := kernel_of(name)) is not None:
            yield name, kernel
