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
from tests.support.tries import trie_row
from threestep.plugins.kernels.blocks import BLOCK_TOKENS, blocks_seen, segment_table, width_in_blocks
from threestep.plugins.kernels.flex import FlexAttention, block_mask, use_flex_attention
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import padded_rows
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
    assert said.startswith("warning: flex_attention now runs unfused") and said.count("\n") == 1
    assert "more than 1 kinds of attention need compiling; use --attn_implementation sdpa" in said


def test_a_soft_cap():
    rows = parallel_row()
    parts = heads_of(rows, 2, 2, 8)
    flex = by_flex(FlexAttention(Compilations()), rows, parts, scaling=1.0, softcap=0.5)
    query, key, value = parts
    scores = 0.5 * torch.tanh(query @ key.transpose(2, 3) / 0.5)
    probabilities = scores.masked_fill(~rows.dense_mask(), float("-inf")).softmax(-1)
    torch.testing.assert_close(flex, (probabilities @ value).transpose(1, 2).flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "with_noise"), [("llama", False), ("llama", True), ("qwen3", False), ("opt", False)]
)
def test_a_model_reads_the_same_of_many_rows(family, with_noise, monkeypatch):
    """transformers gives GPT-2 no FlexAttention."""
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    model = tiny_causal_lm(family)
    alone = padded_rows([TokenSequence(torch.arange(n), torch.arange(n) > 0) for n in (5, 9)], 0)
    for rows in (mixed_layouts(4)[3], alone):
        noise = torch.randn(*rows.input_ids_NT.shape, 32) if with_noise else None
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            dense = PolicyModel(model)(rows, noise_NTE=noise).logprobs_M
            model.set_attn_implementation("flex_attention")
            use_flex_attention(model)
            assert isinstance(AttentionInterface._global_mapping["flex_attention"], FlexAttention)
            with torch.compiler.set_stance("force_eager"):
                flex = PolicyModel(model)(rows, noise_NTE=noise).logprobs_M
        torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def dense(rows: TokenRows) -> torch.Tensor:
    """Who sees whom over all rows as one, bool [L, L], from the dense mask; what fills the last block is padding."""
    count, width = rows.segment_ids_NT.shape
    mask_N1TT = rows.dense_mask()
    if mask_N1TT is None:  # one document a row: causal, and padding apart
        same_NTT = rows.segment_ids_NT.unsqueeze(1) == rows.segment_ids_NT.unsqueeze(2)
        mask_N1TT = same_NTT.tril().unsqueeze(1)
    length = width_in_blocks(count * width)
    whole = torch.zeros(length, length, dtype=torch.bool)
    whole[: count * width, : count * width] = torch.block_diag(*(part[0].long() for part in mask_N1TT)).bool()
    is_padding = torch.zeros(length, dtype=torch.bool)
    is_padding[count * width :] = True
    is_padding[(count - 1) * width : count * width] = rows.segment_ids_NT[-1] == -1
    whole |= (is_padding[:, None] & is_padding[None]).tril()
    return whole


def layouts() -> list[TokenRows]:
    generator = torch.Generator().manual_seed(0)
    several = [
        random_rows(generator, rows, longest) for rows, longest in [(1, 9), (1, 150), (3, 40), (2, 300), (5, 60)]
    ]
    alone = [TokenSequence(torch.ones(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)) for n in (300, 40, 129)]
    return [*several, parallel_row(), trie_row(), padded_rows(alone, 0), padded_rows(alone[:1], 0, min_width=512)]


@pytest.mark.parametrize("number", range(9))
def test_blocks_and_table_are_those_of_the_dense_mask(number):
    rows = layouts()[number]
    mask_LL = dense(rows)
    length = len(mask_LL)
    table, position_L = segment_table(rows), torch.arange(length)
    seen_LL = table.seen[table.queries_L.unsqueeze(1).long() + table.keys_L.unsqueeze(0)]
    by_table_LL = seen_LL & (position_L >= table.first_L.unsqueeze(1)) & (position_L <= position_L.unsqueeze(1))
    assert torch.equal(by_table_LL, mask_LL)
    tiles = mask_LL.view(length // BLOCK_TOKENS, BLOCK_TOKENS, -1, BLOCK_TOKENS)
    partial_bb, whole_bb = blocks_seen(rows)
    assert torch.equal(whole_bb, tiles.all(3).all(1))
    assert torch.equal(partial_bb, tiles.any(3).any(1) & ~whole_bb)


def test_widths_are_whole_blocks_and_two_at_least():
    assert [width_in_blocks(tokens) for tokens in (1, 128, 256, 257, 1000)] == [256, 256, 256, 384, 1024]
