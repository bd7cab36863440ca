"""Attention of token rows: kernels, which plugins add (`attention_kernels` of `Plugin.tables`), and the arguments that
each implementation takes.

| --attn_implementation | argument | where |
| --- | --- | --- |
| auto | of the plugins' kernels and sdpa the first that gives the model's own numbers (`attention_choice`) | |
| sdpa | a boolean mask, None where causal attention is enough | everywhere; quadratic in the row |
| sdpa, on a CPU | the runs that make up the rows (`document_attention`) | families that pass keyword arguments on |
| a kernel of a plugin | its own form of them (`AttentionKernel.lay_out`) | CUDA |

Knows no engine and no loss. Cheap to import: `--help` reaches it.

N rows, T tokens in a row, A heads, K key-value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.base.machine import MemoryLine
    from training.utils.contracts.token_rows import AttentionRun, RunLengths, TokenRows
    from training.utils.layout.planner import PlanSettings
    from training.utils.plugins.plugin import AttentionEntry


AUTO, SDPA = "auto", "sdpa"
KERNELS: dict[str, AttentionEntry] = added("attention_kernels", (AUTO, SDPA))


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

    def why_not(self, model: PreTrainedModel, dropout: float | None) -> str | None:
        """Return None if it can compute the model's attention, else the reason.

        model: loaded and measured, or on the meta device, where its configuration alone is known
        dropout: the rate that will be set, None for the model's own
        """
        return None

    def why_not_here(self) -> str | None:
        """Return None if it can be used on this machine, else the reason."""
        return None

    def use(self, model: PreTrainedModel, by_dense_mask: Callable[..., Any] | None = None) -> None:
        """Give it to a model. by_dense_mask: an attention function for rollouts, where it has none of its own."""

    def lay_out(self, rows: TokenRows, inputs: dict[str, Any]) -> bool:
        """Complete the arguments of a model's forward (`model_inputs`). Return False where the mask that sdpa
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


_FULL = "full_attention"  # of a layer, in configurations
BY_DOCUMENT = "sdpa_by_document"  # what sdpa becomes on a CPU


def text_attention(model: Any) -> str:
    """The attention implementation of a transformers model, where it reads more than text: of its language model."""
    return str(model.config.get_text_config()._attn_implementation)


def set_text_attention(model: Any, name: str) -> None:
    """Give a transformers model the attention `name`. What else it reads keeps its own: there all see each other."""
    text_config = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text_config]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def plan_for(model: Any, sequences: int, longest_tokens: int, **others: Any) -> PlanSettings:
    """Return `forward_plan` with the attention costs of a transformers model. others: its other arguments."""
    from training.utils.layout.planner import forward_plan

    config = model.config.get_text_config()
    # With a dense mask, the cost of attention depends on the row's length; otherwise on those of documents alone.
    is_free = text_attention(model) in (BY_DOCUMENT, *KERNELS)
    plan = forward_plan(sequences, longest_tokens, config.hidden_size, long_rows_are_free=is_free, **others)
    kinds = getattr(config, "layer_types", None) or [_FULL]  # in others, each token costs the same
    return replace(plan, pair_tokens=plan.pair_tokens * kinds.count(_FULL) / len(kinds))


def sliding_window(model: Any) -> int | None:
    """Width of the window of a transformers model's sliding layers (Gemma 3), in tokens; None if it names none."""
    text_config = model.config.get_text_config()
    has_some = "sliding_attention" in (getattr(text_config, "layer_types", None) or ())
    return text_config.sliding_window if has_some else None


def model_inputs(rows: TokenRows, implementation: str, window: int | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a transformers model's forward. Its hidden states are [N, T], or one row of N x T
    and what fills its last block; flattened, each token has the same index. window: see `sliding_window`."""
    inputs: dict[str, Any] = {
        "input_ids": rows.input_ids_NT,
        "position_ids": rows.position_ids_NT,
        "attention_mask": None,
        "use_cache": False,
    }
    kernel = kernel_of(implementation)
    if rows.media is not None:
        if kernel is not None and not kernel.takes_media:
            fitting = [name for name in KERNELS if (each := kernel_of(name)) is not None and each.takes_media]
            rows.media.refuse_attention(implementation, (AUTO, SDPA, *fitting))
        inputs.update(rows.media.positions)
    if kernel is not None and kernel.lay_out(rows, inputs):
        return inputs
    if implementation == BY_DOCUMENT and rows.segments is not None and rows.is_causal:
        from training.utils.contracts.token_rows import runs_of

        give_runs(rows, inputs, runs_of(rows.segment_ids_NT, rows.segments.visible_NSS))
    else:
        inputs["attention_mask"] = mask = rows.dense_mask()
        # A mask that is given replaces the family's own, in layers with a window too. Packed rows are within it.
        if mask is not None and window is not None and rows.segments is None:
            import torch

            ends_TT = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1 - window)
            inputs["attention_mask"] = {"full_attention": mask, "sliding_attention": mask & ends_TT}
    return inputs


def give_runs(rows: TokenRows, inputs: dict[str, Any], runs: Sequence[AttentionRun] | RunLengths | None) -> None:
    """Give a model's attention function the runs of packed rows, in the place of a mask."""
    import torch

    # transformers passes a given mask through, and nothing reads this one, of one byte. A family that does read it
    # gets NaN, so the start-up check rejects it for packed rows.
    unread = torch.zeros((), dtype=torch.bool, device=rows.input_ids_NT.device)
    count, width = rows.input_ids_NT.shape
    inputs.update(attention_mask=unread.expand(count, 1, width, width), runs=runs)
