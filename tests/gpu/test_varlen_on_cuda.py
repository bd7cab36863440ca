"""torch's varlen kernel on a GPU: its causal mask is aligned at the bottom right, forward and backward, with heads that
share keys; and every form of attention that a model may be given is the dense mask's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.random_rows import parallel_row, random_rows
from tests.support.varlen_reference import varlen_attn as reference
from threestep.plugins.kernels.forms import FORMS, attention_of
from threestep.plugins.kernels.varlen import torch_kernel
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows

pytestmark = pytest.mark.gpu

# bfloat16 keeps 8 bits: an output or gradient of a few units is off by some 2^-8 of it, and of sums of them.
TOLERANCE = {"rtol": 2e-2, "atol": 3e-2}


def long_prompts() -> TokenRows:
    """Beyond one block of any kernel: a prompt of 300 with five responses, then a text."""
    ids = torch.arange(10, 700) % 50 + 10

    def part(length: int, is_target: bool) -> TokenSequence:
        return TokenSequence(ids[:length], torch.full((length,), is_target))

    responses = [part(length, True) for length in (150, 1, 129, 128, 77)]
    return packed_rows([[shared_prompt(part(300, False), responses), plain(part(257, False))]], 0)


LAYOUTS = {
    "long prompts": long_prompts,
    "parallel paths": parallel_row,
    "random": lambda: random_rows(torch.Generator().manual_seed(3), 3, 40),
}


def read(attend, parts: list[torch.Tensor], real: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output = attend(*parts)[real]
    return output.detach(), *torch.autograd.grad((output * weights).sum(), parts)


def random_parts(shapes, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("heads", "shared_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("queries", "keys"), [((1, 3, 70), (5, 3, 200)), ((128, 129), (256, 129)), ((1, 1), (9, 1))])
def test_unequal_lengths_are_aligned_at_the_bottom_right(queries, keys, heads, shared_heads):
    total_q, total_k = sum(queries), sum(keys)
    parts = random_parts(
        [(total_q, heads, 64), (total_k, shared_heads, 64), (total_k, shared_heads, 64)], torch.bfloat16
    )
    begins = [torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32) for lengths in (queries, keys)]
    kernel, given = torch_kernel(), {"window_size": (-1, 0), "scale": 0.2}
    if heads != shared_heads:
        given["enable_gqa"] = True

    def by(function):
        return lambda *heads: function(*heads, *begins, max(queries), max(keys), **given)

    weights = torch.randn(total_q, heads, 64, device="cuda")
    every = torch.ones(total_q, dtype=torch.bool, device="cuda")
    try:
        got = read(by(kernel), parts, every, weights)
    except TypeError:
        pytest.skip("this torch's varlen_attn has no enable_gqa")
    wide = [part.detach().double().requires_grad_() for part in parts]
    for ours, wanted in zip(got, read(by(reference), wide, every, weights), strict=True):
        torch.testing.assert_close(ours.double(), wanted, **TOLERANCE)


@pytest.mark.parametrize(("heads", "shared_heads", "size"), [(4, 4, 64), (8, 2, 128), (6, 2, 20)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_dense_mask_forward_and_backward(form, layout, heads, shared_heads, size):
    rows = LAYOUTS[layout]()
    count, width = rows.input_ids_NT.shape
    parts = random_parts(
        [(count, number, width, size) for number in (heads, shared_heads, shared_heads)], torch.bfloat16
    )
    real = (rows.segment_ids_NT >= 0).cuda()
    weights = torch.randn(int(real.sum()), heads, size, device="cuda")
    mask = rows.dense_mask().cuda()

    def dense(*heads: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    wanted = read(dense, [part.detach().double().requires_grad_() for part in parts], real, weights)
    got = read(attention_of(form, rows.to("cuda")), parts, real, weights)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **TOLERANCE)


def test_lengths_are_made_without_a_wait():
    rows = long_prompts().to("cuda")
    assert rows.segments.run_lengths is not None and rows.segments.run_lengths.key_tokens.is_cuda
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_of("varlen", rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
