"""Attention on whole rows from slices, through whichever attention function a model has.

transformers finds attention functions by name. `slice_attention` puts `SlicedAttention` around the one of a name; it
changes calls with a `RowSlice` alone, so that rollouts and other models of the process compute as before.

N rows, T tokens in a row, P ranks, t tokens of a slice, A query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from threestep.plugins.long_rows.exchange import rows_of_heads, shareable, slices_of_rows
from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import ROW_PART

if TYPE_CHECKING:
    import torch

    from threestep.plugins.long_rows.slices import RowSlice

# Arguments of transformers' attention functions (5.19) that are of all heads and tokens, and are not cut here.
_NOT_CUT = ("position_bias", "indices", "block_indices", "head_mask", "cache")


def slice_attention(name: str) -> None:
    """Have transformers' attention function `name` take slices of rows."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None:
        raise ThreestepError(
            f"--sequence_parallel_size needs one of transformers' attention functions, but '{name}' is the family's "
            "own; use --attn_implementation sdpa if the family supports it, or drop --sequence_parallel_size"
        )
    if not isinstance(function, SlicedAttention):
        AttentionInterface.register(name, SlicedAttention(function, takes_mask=not name.startswith("flash")))


class SlicedAttention:
    """transformers' attention function: return ([N, t, A, D], None) of slices, from a call of `whole` on whole rows
    with A/P heads. Its mask is the rows', not the one that it is given. takes_mask: of windows, too."""

    def __init__(self, whole: Callable[..., Any], takes_mask: bool = True) -> None:
        self.whole, self.takes_mask = whole, takes_mask

    def __call__(
        self,
        module: torch.nn.Module,
        query_NAtD: torch.Tensor,
        key_NKtD: torch.Tensor,
        value_NKtD: torch.Tensor,
        attention_mask: Any,
        **others: Any,
    ) -> tuple[torch.Tensor, Any]:
        part: RowSlice | None = others.pop(ROW_PART, None)
        if part is None:
            return self.whole(module, query_NAtD, key_NKtD, value_NKtD, attention_mask, **others)
        group = part.group
        for name in _NOT_CUT:
            if others.get(name) is not None:
                raise ThreestepError(
                    f"--sequence_parallel_size {group.size}: {type(module).__name__} passes {name} to attention, which "
                    "cannot be split across ranks; drop --sequence_parallel_size"
                )
        if others.get("s_aux") is not None:  # a sink for each head
            others["s_aux"] = others["s_aux"].chunk(group.size)[group.place]
        parts = (query_NAtD, shareable(key_NKtD, group), shareable(value_NKtD, group))
        query, key, value = rows_of_heads(parts, part.width, group)
        mask = part.mask_of_layer(others.get("sliding_window"), query.device) if self.takes_mask else part.mask
        output, _ = self.whole(_with_groups(module, query, key), query, key, value, mask, **others)
        return slices_of_rows(output, part.length, group), None


def _with_groups(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The module, with as many query heads to a key head as it has here."""
    groups = query.shape[1] // key.shape[1]
    return module if getattr(module, "num_key_value_groups", groups) == groups else _OtherGroups(module, groups)


class _OtherGroups:
    """A module to attention functions, which read settings of it."""

    def __init__(self, module: torch.nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
