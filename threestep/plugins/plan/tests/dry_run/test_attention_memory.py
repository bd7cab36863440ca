"""Bytes of attention masks, by hand and beside what autograd keeps."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from threestep.plugins.plan.dry_run.attention_memory import mask_lines


def total(*args, element_bytes: int, by_document: bool = False) -> int:
    lines = mask_lines(*args, element_bytes=element_bytes, by_document=by_document)
    return sum(line.device_bytes for line in lines)


def test_sdpa_keeps_a_converted_mask_a_layer():
    """Qwen2.5 7B, 4 rows of 8,192 in bfloat16: 28 masks of 0.5 GiB, beside one of booleans."""
    masks = mask_lines("sdpa", 4, 8192, 28, element_bytes=2, by_document=False)
    assert [line.device_bytes for line in masks] == [2**28, 28 * 2**29]
    assert total("sdpa", 4, 8192, 1, element_bytes=2) == 2**28 + 2**29  # recomputed layer by layer
    # rows of whole multiples of 16 bytes: 10 numbers of 2 bytes take 16
    assert total("sdpa", 1, 10, 1, element_bytes=2) == 100 + 10 * 16 * 2


def test_what_sdpa_keeps_of_a_boolean_mask_here_is_one_converted_mask_a_call():
    """The kernel for CPUs converts and keeps it as the one for CUDA does (torch 2.13)."""
    rows, tokens, kept = 2, 32, {}
    query = torch.randn(rows, 2, tokens, 8, requires_grad=True)
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool).tril()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == mask.shape[-2:]:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(3):
            query = scaled_dot_product_attention(query, query, query, attn_mask=mask)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found == mask_lines("sdpa", rows, tokens, 3, element_bytes=4, by_document=False)[1].device_bytes


def test_others():
    # 4 x 8,192 tokens are 256 blocks: numbers of blocks and their places, partial and full, and their transposes
    assert total("flex_attention", 4, 8192, 28, element_bytes=2) == 16 * (256**2 + 256)
    assert total("flash_attention_2", 4, 8192, 28, element_bytes=2) == 0
    # a run a token: int32 where it begins, twice, and int64 which token its key is
    assert total("varlen", 4, 8192, 28, element_bytes=2) == (4 + 4 + 8) * 4 * 8192
    assert total("sdpa", 2, 10, 5, element_bytes=4, by_document=True) == 2 * 100 * 5  # once, as bool and as numbers
