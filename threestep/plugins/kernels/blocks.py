"""The blocks of 128 x 128 positions that hold something to see, by counting over segments.

Rows stand one after the other, as one. Nothing here is as large as tokens x tokens, and nothing waits for a device.

N rows, T tokens in a row, S segments of a row (padding is the last), L positions of all rows and what fills the last
block, b blocks of them, c blocks that a row may touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class SegmentTable:
    """Query q sees key k if q >= k, k >= first_L[q], and seen[queries_L[q] + keys_L[k]].

    first_L: int32, where the row of a position begins.
    queries_L, keys_L: int32, what a position adds to the index in `seen` as a query and as a key.
    seen: bool [N x S x S].
    """

    first_L: torch.Tensor
    queries_L: torch.Tensor
    keys_L: torch.Tensor
    seen: torch.Tensor


def width_in_blocks(tokens: int) -> int:
    """Return the positions that `tokens` take in whole blocks, two at least: torch.compile treats a size of 1 apart."""
    return BLOCK_TOKENS * max(2, -(-tokens // BLOCK_TOKENS))


def segment_table(rows: TokenRows) -> SegmentTable:
    """Return who sees whom by the rule of `TokenRows.dense_mask`. What fills the last block is padding of the last row.
    In rows of one document, padding sees nothing but padding."""
    (count, width), device = rows.segment_ids_NT.shape, rows.segment_ids_NT.device
    seen_NSS, segments_NT = _seen(rows), _segments(rows)
    segments = seen_NSS.shape[1]
    row_N1 = torch.arange(count, device=device).unsqueeze(1)
    first_NT = (row_N1 * width).expand(count, width)
    queries_NT = (row_N1 * segments + segments_NT) * segments
    last_query = (count * segments - 1) * segments
    fillers = ((count - 1) * width, last_query, segments - 1)
    extra = width_in_blocks(count * width) - count * width
    first_L, queries_L, keys_L = (
        functional.pad(part_NT.flatten(), (0, extra), value=filler).to(torch.int32)
        for part_NT, filler in zip((first_NT, queries_NT, segments_NT), fillers, strict=True)
    )
    # Copied: of a view torch.compile guards the sizes of its base too, and with them the number of rows.
    return SegmentTable(first_L, queries_L, keys_L, seen_NSS.flatten().clone())


def blocks_seen(rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [b, b] twice: blocks of queries by blocks of keys that are seen in part, and those seen whole.

    With n the tokens that a segment has in a block, a pair of blocks holds n_q n_k visible pairs of each two segments
    that see each other, and n (n + 1) / 2 of a segment's own in a block on the diagonal. The sums are whole numbers
    below 2^15, so they are exact in float32, in TF32 too.
    """
    (count, width), device = rows.segment_ids_NT.shape, rows.segment_ids_NT.device
    blocks = width_in_blocks(count * width) // BLOCK_TOKENS
    first_block_N = torch.arange(count, device=device) * width // BLOCK_TOKENS
    tokens_NcS = _tokens_in_blocks(rows, first_block_N)
    seen_NSS = _seen(rows).tril(-1).float()  # within a row a segment stands behind those that it sees
    pairs_Ncc = (tokens_NcS @ seen_NSS + tokens_NcS) @ tokens_NcS.transpose(1, 2)
    pairs_Ncc.diagonal(dim1=1, dim2=2).sub_((tokens_NcS * (tokens_NcS - 1) / 2).sum(2))
    side = blocks + tokens_NcS.shape[1]  # the last row may touch fewer blocks than there is room for
    place_Nc = first_block_N.unsqueeze(1) + torch.arange(tokens_NcS.shape[1], device=device)
    place_Ncc = place_Nc.unsqueeze(2) * side + place_Nc.unsqueeze(1)
    pairs = torch.zeros(side * side, device=device).index_add_(0, place_Ncc.flatten(), pairs_Ncc.tril().flatten())
    pairs_bb = pairs.view(side, side)[:blocks, :blocks]
    whole_bb = pairs_bb == BLOCK_TOKENS**2
    return (pairs_bb > 0) & ~whole_bb, whole_bb


def _tokens_in_blocks(rows: TokenRows, first_block_N: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, c, S]: how many tokens of each segment stand in each block from the row's first on."""
    (count, width), device = rows.segment_ids_NT.shape, rows.segment_ids_NT.device
    segments = _seen(rows).shape[1]
    reach = -(-width // BLOCK_TOKENS) + 3  # one for where the row begins in a block, two for what fills the last ones
    length = width_in_blocks(count * width)
    position_L = torch.arange(length, device=device)
    row_L = (position_L // width).clamp(max=count - 1)
    segment_L = functional.pad(_segments(rows).flatten(), (0, length - count * width), value=segments - 1)
    block_L = position_L // BLOCK_TOKENS - first_block_N[row_L]
    place_L = (row_L * reach + block_L) * segments + segment_L
    tokens = torch.zeros(count * reach * segments, device=device)
    return tokens.index_add_(0, place_L, torch.ones(length, device=device)).view(count, reach, segments)


def _seen(rows: TokenRows) -> torch.Tensor:
    if rows.segments is not None:
        return rows.segments.visible_NSS
    own = torch.eye(2, dtype=torch.bool, device=rows.segment_ids_NT.device)  # the document and its padding
    return own.expand(rows.segment_ids_NT.shape[0], 2, 2)


def _segments(rows: TokenRows) -> torch.Tensor:
    """Return int64 [N, T], padding as the last segment."""
    return rows.segment_ids_NT % _seen(rows).shape[1]
