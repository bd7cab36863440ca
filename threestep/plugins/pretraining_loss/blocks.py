"""Text without prompts, as blocks of one length."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.base.credentials import redacted
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import TextBlock
from training.utils.data import fingerprint
from training.utils.data.build.portions import shuffled_order
from training.utils.data.build.row_maker import ROWS_PER_CALL
from training.utils.data.cache.cache import open_or_build, silent
from training.utils.data.cache.shards import SplitPlan, build_shards
from training.utils.data.files.columns import Expected
from training.utils.data.files.readers import is_saved_dataset, stored_rows
from training.utils.data.fingerprint import ROWS
from training.utils.data.raw_dataset import load_by_name
from training.utils.data.rows.dataset import CachedSplit, token_runs, write_rows
from training.utils.data.rows.tokenize import TextTokenizer, end_of_conversation_id

if TYPE_CHECKING:
    from threestep.plugins.pretraining_loss.arguments import TextArguments
    from training.utils.data.arguments import DataArguments
    from training.utils.data.cache.cache import Log
    from training.utils.data.cache.shards import Counts
    from training.utils.data.rows.media_store import GrowingStore


def build_unsupervised(
    named: TextArguments,
    data: DataArguments,
    tokenizer: Any,
    block_length: int,
    *,
    seed: int,
    is_main_rank: bool = True,
    log: Log | None = None,
) -> CachedSplit:
    """Text of `unsupervised_dataset_name` as blocks of exactly `block_length` tokens, from the cache or built now.

    Documents are shuffled by the seed, each between what the tokenizer puts before a text and its eos (the
    end-of-conversation token where it has no eos), joined and cut. The last, shorter block is dropped; the manifest
    counts its tokens (`tokens_left_over`) and documents without text (`dropped`).
    """
    log = log if log is not None and is_main_rank else silent
    name = named.unsupervised_dataset_name
    if name is None:
        raise ThreestepError(
            "--unsupervised_dataset_name expects a dataset, but the name is empty; pass a dataset's name, or a file "
            "as jsonl:PATH"
        )
    texts = TextTokenizer(tokenizer, data.chat.end_of_conversation_token)
    end_id = texts.end_id if tokenizer.eos_token_id is None else end_of_conversation_id(tokenizer, None)
    column = named.unsupervised_text_column
    stored = None
    if not is_saved_dataset(name):  # whose training split alone is read
        stored = stored_rows(name, "unsupervised_dataset_name", data.cache.cache_dir, hold_out=False)
    if stored is not None:
        for note in stored.notes:
            log(f"data: {redacted(name)}: {note}")
        content = stored.fingerprint()
        rows: Any = None  # opened only by a build
    else:
        rows = _unsupervised_rows(name, named.unsupervised_dataset_config_name, column)
        content = fingerprint.content_of_rows(rows, data.cache.cache_dir)

    def build(folder: str) -> dict[str, Any]:
        source = rows
        if stored is not None:
            source, _ = stored.open(Expected({column: "unsupervised_text_column"}, (column,)))
        order = shuffled_order(len(source), seed)

        def make(begin: int, end: int, counts: Counts, _: GrowingStore) -> Iterator[TextBlock]:
            return _documents(source, order[begin:end], begin, column, texts=texts, end_id=end_id, counts=counts)

        plan = SplitPlan("train", TextBlock, len(source), make)
        documents = build_shards(folder, [plan], data.cache.num_workers, log)["train"]
        blocks = (TextBlock(place, ids) for place, ids in enumerate(_blocks(documents.paths, block_length)))
        written = write_rows(os.path.join(folder, "train.arrow"), TextBlock, blocks)
        left_over = documents.tokens - written.tokens
        if written.rows == 0:
            raise ThreestepError(
                f"--unsupervised_dataset_name: '{name}' has {left_over} tokens, fewer than one block of "
                f"{block_length}; use more text or shorter blocks"
            )
        counted = {**asdict(written), **documents.counts.as_json(), "tokens_left_over": left_over}
        return {"splits": {"train": counted}}

    parts = {
        "datasets": json.dumps([redacted(name), named.unsupervised_dataset_config_name]),
        "rows": content,
        "text column": column,
        "block length": str(block_length),
        "seed": str(seed),
        "end of text": str(end_id),
        "ids before a text": str(texts.prefix_ids),
        **fingerprint.parts_of_tokenizer(tokenizer),
        "code": ROWS,
    }
    return open_or_build(data.cache.cache_dir, "text", parts, build, rebuild=data.cache.rebuild_cache, log=log).splits[
        "train"
    ]


def _unsupervised_rows(name: str, config_name: str | None, column: str) -> Any:
    loaded = load_by_name(name, config_name)
    rows = loaded["train"] if isinstance(loaded, dict) else loaded
    if column not in rows.column_names:
        raise ThreestepError(
            f"--unsupervised_dataset_name: '{name}' has no column '{column}', only {', '.join(rows.column_names)}; "
            "choose one with --unsupervised_text_column"
        )
    return rows


def _documents(
    rows: Any, indices: np.ndarray, first: int, column: str, *, texts: TextTokenizer, end_id: int, counts: Counts
) -> Iterator[TextBlock]:
    """Each document's ids and the token that ends it; `first`: position of the first one in the order."""
    for begin in range(0, len(indices), ROWS_PER_CALL):
        documents = [rows[int(index)][column] for index in indices[begin : begin + ROWS_PER_CALL]]
        places = [place for place, text in enumerate(documents, first + begin) if text]
        counts.dropped.update(["no_text"] * (len(documents) - len(places)))
        encoded = texts.encode_prompts([text for text in documents if text])
        for place, ids in zip(places, encoded, strict=True):
            yield TextBlock(place, np.array([*ids, end_id], np.int32))


def _blocks(paths: Sequence[str], block_length: int) -> Iterator[np.ndarray]:
    """Join the documents and cut them; what is left over is shorter than a block."""
    waiting = np.zeros(0, np.int32)
    for ids in token_runs(paths):
        waiting = np.concatenate([waiting, ids])
        whole = len(waiting) // block_length * block_length
        yield from waiting[:whole].reshape(-1, block_length)
        waiting = waiting[whole:]
