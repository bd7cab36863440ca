"""Decoded rows that are given several tokens at once, the last of which may be taken back.

Every row writes the same columns of the cache. What a row does not keep stays there as a hole, which a mask hides; keys
carry their positions, so that holes do not matter. What no row keeps is cut off.

A rows (B prompts, until they are repeated), Q tokens given at once, P prompt tokens, L columns, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from training.utils.generation.decoding.cache import (
    Moves,
    additive,
    compacted,
    cut,
    for_attention,
    holds_keys_alone,
    leave,
    reorder,
    roomy_cache,
    windows_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KeptRows:
    """The rows of a trunk (a model without its output layer): a cache, a mask of what each row holds, and positions."""

    def __init__(
        self, trunk: PreTrainedModel, seen_BP: torch.Tensor, most_columns: int, *, prefill_tokens: int | None = None
    ) -> None:
        """seen_BP: bool, the columns of the prompts that are seen. most_columns: of prompts and all that is given.
        prefill_tokens: of the prompts that one forward reads; None: all."""
        self._trunk = trunk
        self._cache: Any = roomy_cache(trunk, most_columns)
        self._seen_BP, self._most_columns = seen_BP, most_columns
        self._part_tokens = seen_BP.shape[1]
        if prefill_tokens is not None and holds_keys_alone(self._cache):
            self._part_tokens = prefill_tokens

    def prefill(self, position_ids_BP: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Compute the prompts; return their states [B, P, H]. inputs: input_ids [B, P] or inputs_embeds [B, P, H].

        ValueError if a layer sees but the last tokens, or holds something else than keys and values.
        """
        self._columns, parts = self._seen_BP.shape[1], list[torch.Tensor]()
        for start in range(0, self._columns, self._part_tokens):
            part = slice(start, start + self._part_tokens)
            given = {name: tokens[:, part] for name, tokens in inputs.items()}
            parts.append(self._forward(self._seen_BP[:, : part.stop].long(), position_ids_BP[:, part], given))
        states_BPH = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        windows = windows_of(self._trunk.config, self._cache)
        if any(window is not None for window in windows.values()):
            raise ValueError("its layers see only the most recent tokens, in the order in which they were given")
        self._kinds, self._given = list(windows), 0
        self._next_A = position_ids_BP[:, -1] + 1
        seen_BL = torch.nn.functional.pad(self._seen_BP, (0, self._most_columns - self._columns), value=True)
        self._mask_AL = additive(seen_BL, self._cache.layers[0].keys.dtype)
        return states_BPH

    def repeat(self, order: torch.Tensor) -> None:
        """Let row order[i] be row i; int64, repeats allowed."""
        reorder(self._cache, order)
        self._mask_AL, self._next_A = self._mask_AL[order], self._next_A[order]

    def give(self, count: int, **inputs: torch.Tensor) -> torch.Tensor:
        """Append `count` tokens to each row, each of which sees those before it; return their states [A, Q, H]. inputs:
        input_ids [A, Q] or inputs_embeds [A, Q, H]."""
        start, end = self._columns, self._columns + count
        mask_A1QL = self._mask_AL[:, None, None, :end].repeat(1, 1, count, 1)
        later_QQ = torch.ones(count, count, dtype=torch.bool, device=mask_A1QL.device).triu(1)
        mask_A1QL[..., start:].masked_fill_(later_QQ, float("-inf"))
        steps_Q = torch.arange(count, device=mask_A1QL.device)
        self._columns, self._given = end, count
        return self._forward(
            for_attention(dict.fromkeys(self._kinds, mask_A1QL)), self._next_A.unsqueeze(1) + steps_Q, inputs
        )

    def keep(self, kept_A: torch.Tensor, most: int) -> None:
        """Keep the first `kept_A` of the tokens that each row was given last. most: the largest of them."""
        start, end = self._columns - self._given, self._columns - self._given + most
        taken_AQ = torch.arange(most, device=kept_A.device) >= kept_A.unsqueeze(1)
        self._mask_AL[:, start:end].masked_fill_(taken_AQ, float("-inf"))
        self._next_A = self._next_A + kept_A
        self._cut(end)

    def keep_all(self) -> None:
        """Keep the tokens that were given last."""
        self._next_A = self._next_A + self._given

    def skip(self, count_A: torch.Tensor) -> None:
        """Leave out so many positions of each row before the next token."""
        self._next_A = self._next_A + count_A

    def take_back(self, count: int) -> None:
        """Take back the last `count` tokens of every row, all of which were kept by all."""
        self._next_A = self._next_A - count
        self._cut(self._columns - count)

    def _cut(self, columns: int) -> None:
        if columns < self._columns:
            self._columns = columns
            cut(self._cache, columns)

    def leave(self, moves: Moves) -> None:
        """Drop rows."""
        leave(self._cache, moves)
        self._mask_AL, self._next_A = compacted(self._mask_AL, moves), compacted(self._next_A, moves)

    def _forward(self, mask: Any, position_ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": position_ids, **inputs}
        return self._trunk(**given, past_key_values=self._cache, use_cache=True)[0]
