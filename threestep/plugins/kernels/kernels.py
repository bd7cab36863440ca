"""The kernels as `training.utils.models.attention` takes them: when each can be used, and the form of the rows
that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from threestep.plugins.kernels.blocks import BLOCK_TOKENS, width_in_blocks
from threestep.plugins.kernels.calls import call_of, heads_of
from threestep.plugins.kernels.flex import FLEX, block_mask, use_flex_attention
from threestep.plugins.kernels.forms import time_on_first_rows, why_not_the_mask
from threestep.plugins.kernels.varlen import LARGEST_HEAD, VARLEN, use_varlen_attention, why_no_kernel
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine
from training.utils.models.attention import AttentionKernel, give_runs, set_text_attention, text_attention

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows


class VarlenKernel(AttentionKernel):
    """Attention from the lengths of runs and the keys that each run sees (`varlen`)."""

    why = "torch's kernel for sequences of different lengths, without a mask"
    of_transformers = False
    shares_prompts = True
    takes_media = True

    def why_not(self, model: PreTrainedModel, dropout: float | None) -> str | None:
        missing = why_no_kernel()
        if missing is not None or torch.version.hip is not None:
            return missing or "its kernel is untested on ROCm"
        if not getattr(model, "_supports_attention_backend", False):
            return "the family passes no keyword arguments to attention"
        if model.dtype not in (torch.bfloat16, torch.float16):
            dtype = str(model.dtype).removeprefix("torch.")
            return f"its kernel needs bf16 or fp16, but the model is in {dtype}"
        if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < (8, 0):
            return "its kernel needs a GPU with compute capability 8.0 or higher (Ampere)"
        call = call_of(model, dropout)
        if call.head_sizes[0] > LARGEST_HEAD:
            return f"its kernel supports head sizes up to {LARGEST_HEAD}, but the model's is {call.head_sizes[0]}"
        if call.dropout:
            return f"its kernel does not support dropout, but the model's attention uses {call.dropout:g}"
        return f"its kernel does not support {call.changes[0]}, which the family uses" if call.changes else None

    def use(self, model: PreTrainedModel, by_dense_mask: Callable[..., Any] | None = None) -> None:
        use_varlen_attention(model)

    def lay_out(self, rows: TokenRows, inputs: dict[str, Any]) -> bool:
        takes_runs = rows.segments is not None and rows.is_causal
        if takes_runs:
            give_runs(rows, inputs, rows.lengths())
        return takes_runs

    def why_wrong(self, model: PreTrainedModel, device: torch.device) -> str | None:
        return why_not_the_mask(VARLEN, heads_of(model), model.dtype, device)

    def time_first_rows(self, reader: nn.Module, model: PreTrainedModel, log: Callable[[str], None]) -> None:
        time_on_first_rows(reader, model, log)

    def mask_memory(self, rows: int, tokens: int) -> list[MemoryLine]:
        """The begins of runs, and which token each key is: 16 bytes a token at most. Keys and values that several
        responses see are copied for each, which no length here shows."""
        return [MemoryLine("lengths of runs", 16 * rows * tokens)]


class FlexKernel(AttentionKernel):
    """Compiled attention that skips masked blocks, including those between responses that share a prompt."""

    why = "compiled, with masked blocks skipped"
    of_transformers = True
    shares_prompts = True
    takes_media = False

    def why_not(self, model: PreTrainedModel, dropout: float | None) -> str | None:
        if not getattr(model, "_supports_flex_attn", False):
            return "transformers has no FlexAttention for this family"
        call = call_of(model, dropout)
        if call.head_sizes[1] == 0:
            return "the family does not call attention through transformers' interface"
        if call.head_sizes[1] < 16:
            return f"its kernel needs a head size of at least 16, but the model's is {call.head_sizes[1]}"
        if call.dropout:
            return f"it does not support dropout, but the model's attention uses {call.dropout:g}"
        # transformers' SDPA, by which the model was measured, leaves a soft cap out; FlexAttention would bring it back.
        return f"it would apply the family's {call.changes[0]}, which sdpa ignores" if call.changes else None

    def why_not_here(self) -> str | None:
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which compiles it, is not available here"

    def use(self, model: PreTrainedModel, by_dense_mask: Callable[..., Any] | None = None) -> None:
        if text_attention(model) != FLEX:
            set_text_attention(model, FLEX)
        use_flex_attention(model, by_dense_mask)

    def lay_out(self, rows: TokenRows, inputs: dict[str, Any]) -> bool:
        tokens = rows.input_ids_NT.numel()
        extra = width_in_blocks(tokens) - tokens
        for name in ("input_ids", "position_ids"):
            inputs[name] = functional.pad(inputs[name].view(1, -1), (0, extra))  # id 0, which nothing sees
        inputs["attention_mask"] = block_mask(rows)
        return True

    def why_wrong(self, model: PreTrainedModel, device: torch.device) -> str | None:
        return why_not_the_mask(FLEX, heads_of(model), model.dtype, device)

    def time_first_rows(self, reader: nn.Module, model: PreTrainedModel, log: Callable[[str], None]) -> None:
        time_on_first_rows(reader, model, log)

    def mask_memory(self, rows: int, tokens: int) -> list[MemoryLine]:
        blocks = -(-rows * tokens // BLOCK_TOKENS)  # four tables of blocks, and their transposes, of 4 bytes a number
        return [MemoryLine("block mask", 4 * 4 * (blocks**2 + blocks))]


class FlashKernel(AttentionKernel):
    """Only where it is named: all rows as one, with cumulative lengths in the place of a mask. Responses that share a
    prompt would see each other. The model was loaded with it."""

    why = "FlashAttention with document lengths"
    of_transformers = True
    shares_prompts = False
    takes_media = False

    def lay_out(self, rows: TokenRows, inputs: dict[str, Any]) -> bool:
        lengths, longest = cumulative_lengths(rows)
        inputs["input_ids"] = rows.input_ids_NT.view(1, -1)
        inputs["position_ids"] = rows.position_ids_NT.view(1, -1)
        inputs.update(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=longest, max_length_k=longest)
        return True


def cumulative_lengths(rows: TokenRows) -> tuple[torch.Tensor, int]:
    """Return what FlashAttention takes instead of a mask: where each document begins in the flattened rows, and the
    end, int32 [documents + 1], with a row's padding as one document; and the longest in tokens.

    ThreestepError if a segment sees another, which lengths cannot express.
    """
    if rows.segments is not None:
        visible_NSS = rows.segments.visible_NSS
        own = torch.eye(visible_NSS.shape[1], dtype=torch.bool, device=visible_NSS.device)
        if bool((visible_NSS & ~own).any()):
            raise ThreestepError(
                "FlashAttention's cumulative lengths cannot express responses that share a prompt; use "
                "--attn_implementation sdpa or flex_attention"
            )
    begins_NT = functional.pad(rows.segment_ids_NT.diff(dim=1) != 0, (1, 0), value=True)
    begins = functional.pad(begins_NT.flatten(), (0, 1), value=True)
    lengths = torch.nonzero(begins).flatten().to(torch.int32)
    return lengths, int(lengths.diff().max())
