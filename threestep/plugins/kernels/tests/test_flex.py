"""FlexAttention gives what the dense mask gives, is compiled once a model, and says when it is not compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface

from tests.support.random_rows import parallel_row, random_rows
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.kernels.flex import FlexAttention, block_mask, use_flex_attention
from training.utils.contracts.token_rows import TokenRows
from training.utils.models.token_model import PolicyModel


class Compilations:
    """A backend of torch.compile that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def heads_of(rows: TokenRows, heads: int, shared: int, size: int) -> list[torch.Tensor]:
    """Random queries, keys and values [N, heads or shared, T, size]."""
    generator = torch.Generator().manual_seed(0)
    count, width = rows.input_ids_NT.shape
    return [torch.randn(count, number, width, size, generator=generator) for number in (heads, shared, shared)]


def by_flex(attention: FlexAttention, rows: TokenRows, parts: list[torch.Tensor], **others: Any) -> torch.Tensor:
    """Return [N * T, heads, size]."""
    mask = block_mask(rows)
    tokens = rows.input_ids_NT.numel()
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    extra = mask.shape[-1] - tokens
    whole = [torch.cat([part, part.new_zeros(extra, *part.shape[1:])]).transpose(0, 1)[None] for part in flat]
    whole = [part.clone() for part in whole]  # a model's are no views of another number of heads
    output, sums = attention(torch.nn.Identity(), *whole, mask, **others)
    assert sums is None
    return output[0, :tokens]


def by_mask(rows: TokenRows, parts: list[torch.Tensor]) -> torch.Tensor:
    output = functional.scaled_dot_product_attention(*parts, attn_mask=rows.dense_mask(), enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)


def mixed_layouts(number: int) -> list[TokenRows]:
    generator = torch.Generator().manual_seed(1)
    return [random_rows(generator, 1 + index % 4, longest=10 + index % 20) for index in range(number)]


def test_forty_layouts_and_two_models_compile_once_a_model(capsys):
    """The second has another head size and another scale; its six heads share keys."""
    compilations = Compilations()
    attention = FlexAttention(compilations)
    for index, rows in enumerate([*mixed_layouts(39), parallel_row()]):
        for heads, shared, size in ((2, 1, 16), (6, 2, 8)):
            parts = heads_of(rows, heads, shared, size)
            flex = by_flex(attention, rows, parts, scaling=size**-0.5)
            if index % 8 == 0 or index == 39:
                torch.testing.assert_close(flex, by_mask(rows, parts), rtol=1e-5, atol=1e-5)
    assert compilations.count == 2
    assert capsys.readouterr().out == ""


def test_the_block_mask_is_what_torch_makes_of_its_rule():
    for rows in (parallel_row(), mixed_layouts(4)[3]):
        mask = block_mask(rows)
        length = mask.shape[-1]
        expected = create_block_mask(mask.mask_mod, 1, None, length, length, device="cpu")
        for ours, torchs in zip(mask.as_tuple(), expected.as_tuple(), strict=True):
            assert torch.equal(ours, torchs) if isinstance(ours, torch.Tensor) else callable(ours) or ours == torchs
            # The kernels of its backward read a line's numbers side by side, whatever the strides.
            assert not isinstance(ours, torch.Tensor) or ours.is_contiguous()


def test_what_is_not_compiled_is_said_once_and_right(capsys):
    attention = FlexAttention(Compilations())
    rows = mixed_layouts(1)[0]
    with torch._dynamo.config.patch(recompile_limit=1):
        torch._dynamo.reset()
        for heads in (1, 2, 4, 2):
            parts = heads_of(rows, heads, 1, 8)
            flex = by_flex(attention, rows, parts, scaling=None)
            torch.testing.assert_close(flex, by_mask(rows, parts), rtol=1e-5, atol=1e-5)
    said = capsys.readouterr().out
    assert said.startswith("warning: flex_attention runs unfused") and said.count("\n") == 1
    assert "more than 1 kinds of attention were to be compiled; use --attn_implementation sdpa" in said


def test_a_soft_cap():
    rows = parallel_row()
    parts = heads_of(rows, 2, 2, 8)
    flex = by_flex(FlexAttention(Compilations()), rows, parts, scaling=1.0, softcap=0.5)
    query, key, value = parts
    scores = 0.5 * torch.tanh(query @ key.transpose(2, 3) / 0.5)
    probabilities = scores.masked_fill(~rows.dense_mask(), float("-inf")).softmax(-1)
    torch.testing.assert_close(flex, (probabilities @ value).transpose(1, 2).flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_noise", [False, True])
def test_a_model_reads_the_same_of_many_rows(with_noise, monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    rows = mixed_layouts(4)[3]
    model = tiny_causal_lm("llama")
    noise = torch.randn(*rows.input_ids_NT.shape, 32) if with_noise else None
    with torch.no_grad():
        dense = PolicyModel(model)(rows, noise_NTE=noise).logprobs_M
        model.set_attn_implementation("flex_attention")
        use_flex_attention(model)
        assert isinstance(AttentionInterface._global_mapping["flex_attention"], FlexAttention)
        with torch.compiler.set_stance("force_eager"):
            flex = PolicyModel(model)(rows, noise_NTE=noise).logprobs_M
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)
