"""Multi-token prediction in rows as they are: what each slot of a row takes from the slots before it.

A module of depth d sits in the slot of the token that it embeds: it joins that token's embedding with the state of
depth d - 1 at the token before, and predicts what the slot predicts (DeepSeek-V3, arXiv:2412.19437, section 2.2, where
entry i stands at the token whose state it reads; the numbers are the same). Rows, positions, segments and visibility
therefore stay, and shared prompts, parallel paths and chats need nothing of their own. A token with fewer than d tokens
before it has no entry: nothing may look at its slot, and what it would predict is no target.

N rows, T tokens in a row, L = N * T slots, M tokens to be predicted, S segments of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from training.utils.contracts.token_rows import PAD_SEGMENT, SegmentMap, Slots

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.token_rows import TokenRows


@dataclass(frozen=True)
class MtpEntries:
    """The input of a module of one depth.

    Worked example, the sequence [5 6 7* 8*] (* to be predicted) in one row, depth 1: token 5 has no entry; 6, in slot
    1, takes the state of slot 0 and predicts 7, and 7, in slot 2, takes that of slot 1 and predicts 8:
        before_L [0 0 1 2]   has_entry_NT [[F T T T]]   rows.target_ids_M [7 8]   rows.predictor_M [1 2]
    Depth 2 begins in slot 2: has_entry_NT [[F F T T]], rows.target_ids_M [8], rows.predictor_M [2].

    rows: the same rows, in which nothing looks at a slot without an entry, and with the targets of this depth.
    before_L: int64, the slot whose state of the depth before each entry takes; its own where there is none.
    has_entry_NT: bool.
    """

    rows: TokenRows
    before_L: torch.Tensor
    has_entry_NT: torch.Tensor


def mtp_entries(rows: TokenRows, depths: int) -> tuple[MtpEntries, ...]:
    """Return the entries of depths 1 to `depths`. rows: made with `before_NT`, on the CPU."""
    assert rows.before_NT is not None, "rows for multi-token prediction are laid out with_before"
    before_L = rows.before_NT.flatten()
    has_before_L = before_L != torch.arange(before_L.numel())
    found, has_L = [], has_before_L
    for depth in range(depths):
        if depth:
            has_L = has_before_L & has_L[before_L]
        has_NT = has_L.view_as(rows.before_NT)
        kept_M = has_L[rows.predictor_M]
        targets = (rows.target_ids_M[kept_M], rows.predictor_M[kept_M], rows.sequence_M[kept_M])
        kept = _without(rows, has_NT).with_targets(*targets)
        found.append(MtpEntries(replace(kept, slots=Slots()), before_L, has_NT))
    return tuple(found)


def _without(rows: TokenRows, has_entry_NT: torch.Tensor) -> TokenRows:
    """Return the same rows in which each token without an entry is a segment of its own that only itself sees."""
    is_alone_NT = ~has_entry_NT & (rows.segment_ids_NT != PAD_SEGMENT)
    most = int(is_alone_NT.sum(dim=1).max())
    count = len(is_alone_NT)
    one = torch.eye(2, dtype=torch.bool).repeat(count, 1, 1), torch.tensor([[1, 0]]).repeat(count, 1)
    visible_NSS, copies_NS = (rows.segments.visible_NSS, rows.segments.copies_NS) if rows.segments is not None else one
    before = visible_NSS.shape[1] - 1  # without padding, the last
    wider_NSS = torch.eye(before + most + 1, dtype=torch.bool).repeat(count, 1, 1)
    wider_NSS[:, :before, :before] = visible_NSS[:, :before, :before]
    new_NT = before + is_alone_NT.cumsum(dim=1) - 1
    segment_ids_NT = torch.where(is_alone_NT, new_NT, rows.segment_ids_NT)
    # One sequence holds what stands alone, as far as anybody counts.
    copies_NS = torch.cat([copies_NS[:, :before], torch.ones(count, most, dtype=torch.int64), copies_NS[:, -1:]], dim=1)
    return replace(rows, segment_ids_NT=segment_ids_NT, segments=SegmentMap(wider_NSS, copies_NS))


def mtp_targets(documents: Sequence[Document], depth: int) -> int:
    """Return how many tokens a module of `depth` predicts in `documents`: those with more than `depth` tokens before
    them in their sequence."""
    return sum(_targets_of(document, depth) for document in documents)


def _targets_of(document: Document, depth: int) -> int:
    found, ends = 0, list[int]()  # of each segment: tokens of its sequence up to its end
    for segment, owners in zip(document.segments, document.owners, strict=True):
        start = 0 if segment.predecessor is None else ends[segment.predecessor]
        found += len(owners) * int(segment.tokens.is_target[max(0, depth + 1 - start) :].sum())
        ends.append(start + len(segment.tokens))
    return found
