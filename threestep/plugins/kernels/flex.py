"""FlexAttention of rows of segments: its block mask, and one compiled function for rows of every layout.

transformers' function (5.19) is compiled anew for new shapes and falls back to unfused attention, which holds all
scores of a row, at the ninth, in silence. Here all rows are one of whole blocks, and every size is dynamic from the
first call on: a model is compiled once with gradients and once without.

L positions of all rows in whole blocks, A heads, K key-value heads, D head size, b blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.compiler import is_dynamo_compiling
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import sdpa_mask

from threestep.plugins.kernels.blocks import BLOCK_TOKENS, SegmentTable, blocks_seen, segment_table
from training.utils.base.console import log_on_main

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows

FLEX = "flex_attention"  # transformers' name
_BLOCKS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def use_flex_attention(model: PreTrainedModel, by_dense_mask: Callable[..., Any] | None = None) -> None:
    """Give a model that computes FlexAttention this module's function, under transformers' name for it.

    by_dense_mask: an attention function for SDPA's masks, which rollouts then get: it compiles nothing
    """
    if model.config.get_text_config()._attn_implementation == FLEX:
        AttentionInterface.register(FLEX, FlexAttention(by_dense_mask=by_dense_mask))
        if by_dense_mask is not None:
            AttentionMaskInterface.register(FLEX, sdpa_mask)


class SegmentBlockMask(BlockMask):
    """A block mask [1, 1, L, L] with the table that it is made from; transformers passes it on to attention."""

    table: SegmentTable


def block_mask(rows: TokenRows) -> SegmentBlockMask:
    """Return the block mask of all rows as one, by the rule of `TokenRows.dense_mask`.

    Made from counts over segments: torch's `create_block_mask` holds 10 bytes for each pair of positions.
    """
    table = segment_table(rows)
    length = len(table.first_L)
    partial_bb, whole_bb = blocks_seen(rows)
    lines = (partial_bb, whole_bb, partial_bb.transpose(0, 1), whole_bb.transpose(0, 1))  # in the order of `_BLOCKS`
    parts = (part for seen_bb in lines for part in _ordered(seen_bb))
    blocks: dict[str, Any] = dict(zip(_BLOCKS, parts, strict=True))
    size = (BLOCK_TOKENS, BLOCK_TOKENS)
    mask = SegmentBlockMask((length, length), **blocks, BLOCK_SIZE=size, mask_mod=_seen_by(table))
    mask.table = table
    return mask


def _seen_by(table: SegmentTable) -> Callable[..., Any]:
    """Return the table's rule as FlexAttention takes it."""
    first_L, queries_L, keys_L, seen = table.first_L, table.queries_L, table.keys_L, table.seen

    def sees(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (k >= first_L[q]) & seen[queries_L[q] + keys_L[k]]

    return sees


def _ordered(seen_bb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 [1, 1, b] and [1, 1, b, b]: in each line of `seen_bb` how many blocks are seen, and the numbers of
    all blocks, these first. Places are counted, not sorted.

    The numbers of a line lie side by side: torch's kernels (2.11) read them so whatever their strides, and took wrong
    blocks for the gradients of keys and values from a transposed table.
    """
    seen = seen_bb.to(torch.int32, memory_format=torch.contiguous_format)
    seen_before, count = seen.cumsum(1) - seen, seen.sum(1, dtype=torch.int32)
    number_bb = torch.arange(len(seen), device=seen.device).expand_as(seen)
    place_bb = torch.where(seen_bb, seen_before, count.unsqueeze(1) + number_bb - seen_before)
    indices_bb = torch.zeros_like(seen).scatter_(1, place_bb.long(), number_bb.to(torch.int32))
    return count[None, None], indices_bb[None, None]


class FlexAttention:
    """transformers' attention function: return ([1, L, A, D], None).

    Calls that differ from training's (another mask, as in rollouts; scores that a bias or a sink changes; dropout) are
    left to transformers, or to `by_dense_mask`. Once the compiler reaches its limit, the forward is computed unfused,
    and one line notes it.
    """

    def __init__(self, backend: Any = "inductor", by_dense_mask: Callable[..., Any] | None = None) -> None:
        """backend: torch.compile's. by_dense_mask: for a dense mask, or None, which is causal."""
        self._by_dense_mask = by_dense_mask
        self._compiled = torch.compile(_attend, dynamic=True, fullgraph=True, backend=backend)
        self._has_logged = False

    def __call__(
        self,
        module: torch.nn.Module,
        query_1ALD: torch.Tensor,
        key_1KLD: torch.Tensor,
        value_1KLD: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        softcap = others.get("softcap")
        if self._by_dense_mask is not None and not isinstance(attention_mask, BlockMask):
            return self._by_dense_mask(
                module, query_1ALD, key_1KLD, value_1KLD, attention_mask, scaling=scaling, **others
            )
        changes = any(others.get(name) is not None for name in ("s_aux", "position_bias", "kernel_options"))
        if not isinstance(attention_mask, SegmentBlockMask) or changes or others.get("dropout"):
            return flex_attention_forward(
                module, query_1ALD, key_1KLD, value_1KLD, attention_mask, scaling=scaling, **others
            )
        blocks = {name: getattr(attention_mask, name) for name in _BLOCKS}
        attend = _attend if is_dynamo_compiling() else self._attend
        numbers = _as_text(scaling), _as_text(softcap)
        return attend(query_1ALD, key_1KLD, value_1KLD, blocks, attention_mask.table, numbers), None

    def _attend(self, *given: Any) -> torch.Tensor:
        for part_1ALD in given[:3]:  # or a number of blocks that equals that of heads would count as the same size
            torch._dynamo.mark_static(part_1ALD, 1)
            torch._dynamo.mark_static(part_1ALD, 3)
        try:
            return self._compiled(*given)
        except FailOnRecompileLimitHit:
            if not self._has_logged:
                log_on_main(
                    "warning: flex_attention now runs unfused for some models, which is slow and stores all scores of "
                    f"a row: more than {torch._dynamo.config.recompile_limit} kinds of attention need compiling; "
                    "use --attn_implementation sdpa"
                )
                self._has_logged = True
            return _attend(*given)


def _as_text(number: float | None) -> str | None:
    return None if number is None else repr(float(number))


def _attend(
    query_1ALD: torch.Tensor,
    key_1KLD: torch.Tensor,
    value_1KLD: torch.Tensor,
    blocks: dict[str, Any],
    table: SegmentTable,
    numbers: tuple[str | None, str | None],
) -> torch.Tensor:
    """Return [1, L, A, D].

    blocks: `_BLOCKS` of the mask, which is put together here, so that its length is the queries' and no other number
        that the compiler would have to watch.
    numbers: scale and soft cap as text: the compiler makes floats dynamic, and its kernel takes constant ones.
    """
    scale, cap = (None if number is None else float(number) for number in numbers)
    heads, length = query_1ALD.shape[1:3]
    if heads & (heads - 1):  # as in transformers: the kernel takes shared keys for powers of 2
        copies = heads // key_1KLD.shape[1]
        key_1KLD, value_1KLD = (part.repeat_interleave(copies, dim=1) for part in (key_1KLD, value_1KLD))

    def capped(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    # BLOCK_TOKENS as a literal: the kernel takes a constant, and the compiler would make a global number dynamic.
    mask = BlockMask((length, length), **blocks, BLOCK_SIZE=(128, 128), mask_mod=_seen_by(table))
    output_1ALD = flex_attention(
        query_1ALD,
        key_1KLD,
        value_1KLD,
        score_mod=None if cap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=key_1KLD.shape[1] != heads,
    )
    assert isinstance(output_1ALD, torch.Tensor)  # a pair if more is requested
    return output_1ALD.transpose(1, 2).contiguous()
