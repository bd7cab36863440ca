"""Memory of an attention implementation's masks, in bytes of one forward. Pure numbers.

N rows, T tokens in a row.
"""

from __future__ import annotations

from training.utils.base.machine import MemoryLine
from training.utils.models.attention import SDPA, kernel_of


def mask_lines(
    implementation: str, rows: int, tokens: int, layers: int, *, element_bytes: int, by_document: bool
) -> list[MemoryLine]:
    """Return the memory of the masks of `rows` packed rows.

    layers: whose forward is held for the backward at once: all, or with gradient checkpointing one.
    element_bytes: of a number that the model computes with.
    by_document: sdpa goes run by run, as on a CPU: masks of responses alone, taken to be less than one of all.

    sdpa: one boolean mask [N, 1, T, T]; each call converts it to the scores' dtype, in rows of whole multiples of 16
    bytes, and keeps the result for its backward (torch 2.13, ATen/native/transformers/attention.cpp:
    convert_boolean_attn_mask, pad_bias). Kernels say what they take in its place. Others: none.
    """
    if implementation == SDPA:
        mask = rows * tokens**2
        if by_document:
            return [MemoryLine("attention mask", mask * (1 + element_bytes))]
        aligned = 16 // element_bytes
        width = -(-tokens // aligned) * aligned
        saved = layers * rows * tokens * width * element_bytes
        what = f"attention masks stored for sdpa, {layers} layer{'s' if layers > 1 else ''}"
        return [MemoryLine("attention mask", mask), MemoryLine(what, saved)]
    kernel = kernel_of(implementation)
    return [] if kernel is None else kernel.mask_memory(rows, tokens)
