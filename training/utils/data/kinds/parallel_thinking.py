"""Rows that are laid out as parallel thinking: the ids of the tags, and what happens to malformed blocks.

Rows keep flat ids; `documents` lays them out at collation, by `training.utils.layout.parallel`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.paths import ParallelTags
from training.utils.data.rows.documents import written_tokens
from training.utils.data.rows.tokenize import token_id
from training.utils.layout.parallel import Block, MalformedBlocks, find_blocks

if TYPE_CHECKING:
    from training.utils.data.chat.arguments import ChatArguments


def parallel_tags(chat: ChatArguments, tokenizer: Any) -> ParallelTags | None:
    """The ids of the tags, None without `--parallel_thinking`; ThreestepError where a tag is not one token."""
    if not chat.parallel_thinking:
        return None
    ids = []
    for tag in chat.parallel_tags:
        index = token_id(tokenizer, tag)
        inside_text = tokenizer(f"a{tag}b", add_special_tokens=False)["input_ids"]
        if index is None or index not in inside_text:
            raise ThreestepError(
                f"--parallel_tags expects every tag to be one token, got '{tag}', which is none; add it, as "
                "steps 1 and 2 do with --parallel_thinking"
            )
        ids.append(index)
    return ParallelTags(*ids)


class ParallelCheck:
    """Finds blocks in responses before truncation. counts: gains the rows `with blocks` and `malformed and causal`."""

    def __init__(self, chat: ChatArguments, tags: ParallelTags | None, counts: Counter[str]) -> None:
        self._tags = tags
        self._tags_in_words = " ".join(chat.parallel_tags)
        self._malformed = chat.malformed_parallel
        self._counts = counts

    def tags_of(
        self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None
    ) -> tuple[int, ...] | None:
        """The tags' ids where the row has blocks to lay out, otherwise None.

        texts: the ids of its whole responses, or of one whole conversation with the loss mask `loss`.
        where: names the row.
        A malformed block raises ThreestepError with `--malformed_parallel error`, MalformedBlocks with `drop`, and
        gives None with `causal`.
        """
        if self._tags is None:
            return None
        try:
            has_blocks = any([self._blocks(ids, loss) for ids in texts])
        except MalformedBlocks as problem:
            if self._malformed == "error":
                raise ThreestepError(
                    f"{where}: the tags of parallel thinking ({self._tags_in_words}) do not match in the response: "
                    f"{problem}; correct the row, or choose --malformed_parallel drop or causal"
                ) from None
            if self._malformed == "drop":
                raise
            self._counts["malformed and causal"] += 1
            return None
        self._counts["with blocks"] += has_blocks
        return astuple(self._tags) if has_blocks else None

    def is_whole(
        self, texts: Sequence[Sequence[int]], loss: Sequence[bool] | None = None, may_end_open: bool = False
    ) -> bool:
        """True if truncation left a row's blocks whole. may_end_open: the last one may be cut."""
        try:
            for ids in texts:
                self._blocks(ids, loss, may_end_open)
        except MalformedBlocks:
            return False
        return True

    def _blocks(self, ids: Sequence[int], loss: Sequence[bool] | None, cut: bool = False) -> tuple[Block, ...]:
        assert self._tags is not None
        written = None if loss is None else written_tokens(torch.tensor(loss, dtype=torch.bool))
        return find_blocks(torch.tensor(ids, dtype=torch.int64), self._tags, written, cut)


def parts_of_parallel_thinking(chat: ChatArguments, tags: ParallelTags | None) -> dict[str, str]:
    """Its parts of a phase's fingerprint: none where it is off."""
    if tags is None:
        return {}
    return {
        "parallel_thinking": json.dumps([chat.parallel_tags, vars(tags)]),
        "malformed_parallel": chat.malformed_parallel,
    }
