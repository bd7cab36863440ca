"""Which rows of a phase are laid out as parallel thinking: the tags' ids, and what becomes of malformed blocks.

Rows keep flat ids; the layout itself is made at collation (`documents`), by `training.utils.layout.parallel`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from training.utils.data.arguments import DataArguments
from training.utils.data.documents import written_tokens
from training.utils.layout.parallel import Block, MalformedBlocks, ParallelTags, find_blocks
from training.utils.run.errors import ThreestepError


def parallel_tags(data: DataArguments, tokenizer: Any) -> ParallelTags | None:
    """The ids of the four tags, None without `--parallel_thinking`.

    Raises ThreestepError where a tag is not one token (`models.loading.add_tokens` makes it one).
    """
    if not data.parallel_thinking:
        return None
    ids = []
    for tag in data.parallel_tags:
        index = tokenizer.convert_tokens_to_ids(tag)
        inside_text = tokenizer(f"a{tag}b", add_special_tokens=False)["input_ids"]
        if index is None or index == tokenizer.unk_token_id or index not in inside_text:
            raise ThreestepError(
                f"parallel_tags: expected every tag to be one token, and to the tokenizer '{tag}' is none; add it, as "
                "steps 1 and 2 do with --parallel_thinking"
            )
        ids.append(int(index))
    return ParallelTags(*ids)


class ParallelCheck:
    """Reads the responses of a build for blocks, before truncation, and says which rows have them.

    counts: gains the rows `with blocks`, and those `malformed and causal`.
    """

    def __init__(self, data: DataArguments, tags: ParallelTags | None, counts: Counter[str]) -> None:
        self._tags = tags
        self._names = " ".join(data.parallel_tags)
        self._malformed = data.malformed_parallel
        self._counts = counts

    def tags_of(
        self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None
    ) -> tuple[int, ...] | None:
        """The tags' ids where the row has blocks to lay out, None where it has none.

        texts: the ids of its whole responses, or of one whole conversation with the loss mask `loss`. where: names the
        row. Of a malformed block: ThreestepError with `--malformed_parallel error`, MalformedBlocks with `drop`, None
        with `causal`.
        """
        if self._tags is None:
            return None
        try:
            found = any([self._blocks(ids, loss) for ids in texts])
        except MalformedBlocks as problem:
            if self._malformed == "error":
                raise ThreestepError(
                    f"{where}: the tags of parallel thinking ({self._names}) do not match in the response: {problem}; "
                    "mend the row, or choose --malformed_parallel drop or causal"
                ) from None
            if self._malformed == "drop":
                raise
            self._counts["malformed and causal"] += 1
            return None
        self._counts["with blocks"] += found
        return astuple(self._tags) if found else None

    def is_whole(
        self, texts: Sequence[Sequence[int]], loss: Sequence[bool] | None = None, may_end_open: bool = False
    ) -> bool:
        """Whether truncation left the blocks of a row that has some whole. may_end_open: but for the end of the
        last."""
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


def parts_of_parallel_thinking(data: DataArguments, tags: ParallelTags | None) -> dict[str, str]:
    """What it adds to the fingerprint of a phase: nothing where it is off."""
    if tags is None:
        return {}
    return {
        "parallel_thinking": json.dumps([data.parallel_tags, vars(tags)]),
        "malformed_parallel": data.malformed_parallel,
    }
