"""Blocks counted over segments are those of the dense mask."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_rows import parallel_row, random_rows
from tests.support.tries import trie_row
from threestep.plugins.kernels.blocks import BLOCK_TOKENS, blocks_seen, segment_table, width_in_blocks
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import padded_rows


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
