"""Sums that prove that weights arrived; tests/vllm sends them for real."""

from __future__ import annotations

import torch

from training.utils.generation.vllm_weights import BitSums


def sums(**tensors: torch.Tensor) -> BitSums:
    found = BitSums()
    for name, tensor in tensors.items():
        found.add(name.replace("_", "."), tensor)
    return found


def test_joined_split_transposed_and_filled_up_weights_sum_up_alike():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, head = (torch.randn(size, 6, generator=generator).to(dtype) for size in (4, 2, 5))
        apart = sums(h_0_query=query, h_0_key=key, head=head)
        filled = torch.cat([head, torch.zeros(3, 6, dtype=dtype)])
        assert apart.differing(sums(h_0_both=torch.cat([query, key]).t(), head=filled)) == []


def test_the_layer_with_a_changed_number_is_named():
    weight = torch.ones(3, 3)
    changed = weight.clone()
    changed[1, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    whole = sums(h_0_w=weight, h_1_w=weight, head=weight)
    assert whole.differing(sums(h_0_w=weight, h_1_w=changed, head=weight)) == ["layer 1"]
    assert whole.differing(sums(h_0_w=weight, h_1_w=weight, head=changed)) == ["outside the layers"]
    assert whole.differing(sums(h_0_w=weight, head=weight)) == ["layer 1"]


def test_sums_do_not_overflow():
    """2**20 numbers of the largest bit pattern below the sign: 2**20 * (2**31 - 1) is far above 2**32."""
    most = torch.full((2**20,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert sums(w=most).by_layer[None] == 2**20 * (2**31 - 1)
