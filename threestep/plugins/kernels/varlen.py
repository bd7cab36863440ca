"""Attention of the runs of all rows in one kernel without a mask, for CUDA: torch's own `varlen_attn`.

The queries of a run (`contracts.token_rows`) stand at the end of its keys: what it sees, then its own tokens.
`varlen_attn` is FlashAttention 2, whose causal mask is aligned at the bottom right where queries and keys differ in
number: query i of a sequence sees the keys up to i + keys - queries. In torch's source,
aten/src/ATen/native/transformers/cuda/flash_attn: mask.h, `col_idx_limit_right = row_idx + 1 + max_seqlen_k -
max_seqlen_q`, which the kernels are given as the lengths of that one sequence (`binfo.actual_seqlen_k`,
`actual_seqlen_q`); pytorch/pytorch#193630 says it in words. `tests/gpu/test_varlen_on_cuda.py` holds it against a dense
mask.

Knows no layout but `RunLengths`. N rows, T tokens in a row, A heads, K key-value heads, D head size (values may have
another), L tokens of all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from threestep.plugins.kernels.calls import CHANGES_SCORES
from training.utils.base.errors import ThreestepError
from training.utils.models.attention import set_text_attention
from training.utils.models.document_attention import attention_by_document

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import RunLengths

VARLEN = "varlen"
LARGEST_HEAD = 256  # of FlashAttention 2 in torch 2.11 to 2.13


def use_varlen_attention(model: PreTrainedModel) -> None:
    """Switch a model whose family passes keyword arguments on to attention to this module's function."""
    AttentionInterface.register(VARLEN, VarlenAttention(torch_kernel()))
    AttentionMaskInterface.register(VARLEN, sdpa_mask)  # for rollouts, which pass no runs
    set_text_attention(model, VARLEN)


def why_no_kernel() -> str | None:
    """Return None if this torch has `varlen_attn` with a scale and a window (torch 2.11), else the missing part."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if not {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"varlen_attn in torch {torch.__version__} lacks the scale and window_size arguments"
    return None


def torch_kernel() -> Callable[..., Any]:
    """Return torch's `varlen_attn`, as [L, A, D] of queries and [keys, K, D] of keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


class VarlenAttention:
    """transformers' attention function: return ([N, T, A, D], None).

    others: `runs`, a RunLengths, from `model_inputs`. Without it this is `attention_by_document`, as in rollouts and in
    rows of one document, for which causal attention is enough.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        """kernel: with the signature of torch's `varlen_attn`."""
        self._kernel = kernel
        self._groups = "enable_gqa" in inspect.signature(kernel).parameters  # torch 2.11 documents equal heads alone

    def __call__(
        self,
        module: torch.nn.Module,
        query_NATD: torch.Tensor,
        key_NKTD: torch.Tensor,
        value_NKTD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """ThreestepError for arguments that the kernel cannot compute."""
        lengths: RunLengths | None = others.pop("runs", None)
        if lengths is None:
            return attention_by_document(
                module, query_NATD, key_NKTD, value_NKTD, attention_mask, dropout=dropout, scaling=scaling, **others
            )
        changes = [name for name in CHANGES_SCORES if others.get(name) is not None]
        if changes or dropout:
            what = changes[0] if changes else f"dropout of {dropout:g}"
            raise ThreestepError(
                f"{VARLEN} attention does not support {what}, which {type(module).__name__} uses; use "
                "--attn_implementation sdpa"
            )
        count, heads, width, size = query_NATD.shape
        value_size = value_NKTD.shape[-1]
        query, key, value = (_flat(part) for part in (query_NATD, key_NKTD, value_NKTD))
        if lengths.key_tokens is not None:
            key, value = (_Seen.apply(part, lengths.key_tokens) for part in (key, value))
        copies = heads // key.shape[1]
        grouped = {"enable_gqa": copies > 1} if self._groups else {}
        if copies > 1 and not self._groups:
            key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
        whole = -(-max(size, value_size) // 8) * 8  # the kernel takes multiples of 8, and one size for all
        query, key, value = (functional.pad(part, (0, whole - part.shape[-1])) for part in (query, key, value))
        output = self._kernel(
            query,
            key,
            value,
            lengths.begins,
            lengths.key_begins,
            lengths.longest,
            lengths.longest_keys,
            scale=size**-0.5 if scaling is None else scaling,
            window_size=(-1, 0),  # causal
            **grouped,
        )
        return output[..., :value_size].reshape(count, width, heads, value_size), None


class _Seen(torch.autograd.Function):
    """Rows of [L, K, D] in another order, some several times. Gradients of a token that several runs see are added in
    float32: in half precision each addition would round."""

    @staticmethod
    def forward(ctx: Any, part_LKD: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.length = len(part_LKD)
        return part_LKD.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (tokens,), (grad,) = ctx.saved_tensors, grads
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return wide.new_zeros(ctx.length, *grad.shape[1:]).index_add_(0, tokens, wide).to(grad.dtype), None


def _flat(part_NATD: torch.Tensor) -> torch.Tensor:
    """Return [N * T, heads, D]."""
    return part_NATD.transpose(1, 2).flatten(0, 1)
