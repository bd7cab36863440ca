"""Text without prompts: blocks of one length, what they depend on, and mistakes in flags and files."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.data_flags import with_flags
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.build.unsupervised import build_unsupervised

OTHER_TOKENIZER = [*SENTENCES, "so very many other words to merge, so very many"]


@pytest.fixture
def text_flags(flags, write_rows):
    def make(texts, **given):
        path = write_rows([{"text": text} for text in texts], "texts.jsonl")
        return flags(unsupervised_dataset_name=f"jsonl:{path}", **given)

    return make


def test_blocks_of_exactly_the_length(text_flags, tiny_tokenizer):
    texts = [f"text {i} " * (i % 5 + 1) for i in range(50)]
    blocks = build_unsupervised(text_flags(texts), tiny_tokenizer, 16, seed=1)
    assert {len(block.input_ids) for block in blocks} == {16} and set(blocks.lengths) == {16}
    joined = tiny_tokenizer.decode(np.concatenate([block.input_ids for block in blocks]))
    whole = joined.split("<|endoftext|>")[:-1]
    assert len(whole) > 40 and set(whole) <= set(texts) and len(set(whole)) == len(whole)
    left_over = blocks.manifest["splits"]["train"]["tokens_left_over"]
    total = sum(len(tiny_tokenizer(text)["input_ids"]) + 1 for text in texts)
    assert len(blocks) * 16 + left_over == total and left_over < 16


def test_blocks_follow_seed_length_text_and_tokenizer(text_flags, tiny_tokenizer):
    texts = [f"some text of number {i}" for i in range(30)]
    log: list[str] = []

    def blocks(data, tokenizer=tiny_tokenizer, length=16, seed=1):
        log.clear()
        built = build_unsupervised(data, tokenizer, length, seed, log=log.append)
        return [block.input_ids.tolist() for block in built], "from the cache" in log[-1]

    first, resumed = blocks(text_flags(texts))
    assert not resumed
    assert blocks(text_flags(texts)) == (first, True)
    other, resumed = blocks(text_flags(texts), seed=2)
    assert other != first and not resumed
    assert not blocks(text_flags(texts), length=17)[1]
    assert not blocks(text_flags(texts), tokenizer=train_tokenizer(OTHER_TOKENIZER))[1]
    assert not blocks(text_flags([*texts[:-1], "another"]))[1]


def test_text_from_a_folder(flags, tiny_tokenizer, tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"text": f"text {i}"} for i in range(50)])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "texts"))
    data = flags(unsupervised_dataset_name=str(tmp_path / "texts"))
    assert len(build_unsupervised(data, tiny_tokenizer, 8, seed=1)) > 10
    with pytest.raises(ThreestepError, match="no column 'body', its columns are text.*--unsupervised_text_column"):
        build_unsupervised(with_flags(data, unsupervised_text_column="body"), tiny_tokenizer, 8, seed=1)


def test_mistakes_in_unsupervised_text(flags, text_flags, tiny_tokenizer, write_rows):
    with pytest.raises(ThreestepError, match="--unsupervised_dataset_name expects a dataset, got none"):
        build_unsupervised(flags(), tiny_tokenizer, 8, seed=1)
    with pytest.raises(ThreestepError, match="unsupervised_dataset_name: 'missing.jsonl' names a file that does"):
        build_unsupervised(flags(unsupervised_dataset_name="jsonl:missing.jsonl"), tiny_tokenizer, 8, seed=1)
    with pytest.raises(ThreestepError, match="fewer than one block of 500"):
        build_unsupervised(text_flags(["short"]), tiny_tokenizer, 500, seed=1)
    path = write_rows([{"text": "a"}, {"body": "b"}], "mixed.jsonl")
    with pytest.raises(ThreestepError, match="mixed.jsonl, line 2: no column 'text'.*--unsupervised_text_column"):
        build_unsupervised(flags(unsupervised_dataset_name=f"jsonl:{path}"), tiny_tokenizer, 8, seed=1)
