"""Text without prompts: blocks of one length, their loss beside the policy, and where a stopped run goes on."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from tests.unit.step3_ppo.learning.test_learning import PLANS, made_roles, random_experience, stepped
from tests.unit.utils.data.test_fingerprint_row_versions import PAIRS, byte_tokenizer, compare
from threestep.plugins.pretraining_loss.arguments import TextArguments
from threestep.plugins.pretraining_loss.blocks import build_unsupervised
from threestep.plugins.pretraining_loss.learnt_texts import LearntTexts, pretraining_loss, text_batches
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rows import TextBlock
from training.utils.data.cache import shards
from training.utils.layout.trie import SequenceLayout

OTHER_TOKENIZER = [*SENTENCES, "so very many other words to merge, so very many"]


@pytest.fixture
def text_flags(write_rows):
    def make(texts):
        return TextArguments(f"jsonl:{write_rows([{'text': text} for text in texts], 'texts.jsonl')}")

    return make


@pytest.fixture
def build(flags):
    """Build the blocks of TextArguments, in the cache of the test."""
    data = flags()
    return lambda named, *given, **how: build_unsupervised(named, data, *given, **how)


def test_blocks_of_exactly_the_length(text_flags, build, tiny_tokenizer):
    texts = [f"text {i} " * (i % 5 + 1) for i in range(50)]
    blocks = build(text_flags(texts), tiny_tokenizer, 16, seed=1)
    assert {len(block.input_ids) for block in blocks} == {16} and set(blocks.lengths) == {16}
    joined = tiny_tokenizer.decode(np.concatenate([block.input_ids for block in blocks]))
    whole = joined.split("<|endoftext|>")[:-1]
    assert len(whole) > 40 and set(whole) <= set(texts) and len(set(whole)) == len(whole)
    left_over = blocks.manifest["splits"]["train"]["tokens_left_over"]
    total = sum(len(tiny_tokenizer(text)["input_ids"]) + 1 for text in texts)
    assert len(blocks) * 16 + left_over == total and left_over < 16


def test_blocks_follow_seed_length_text_and_tokenizer(text_flags, build, tiny_tokenizer):
    texts = [f"some text of number {i}" for i in range(30)]
    log: list[str] = []

    def blocks(named, tokenizer=tiny_tokenizer, length=16, seed=1):
        log.clear()
        built = build(named, tokenizer, length, seed=seed, log=log.append)
        return [block.input_ids.tolist() for block in built], "from the cache" in log[-1]

    first, resumed = blocks(text_flags(texts))
    assert not resumed
    assert blocks(text_flags(texts)) == (first, True)
    other, resumed = blocks(text_flags(texts), seed=2)
    assert other != first and not resumed
    assert not blocks(text_flags(texts), length=17)[1]
    assert not blocks(text_flags(texts), tokenizer=train_tokenizer(OTHER_TOKENIZER))[1]
    assert not blocks(text_flags([*texts[:-1], "another"]))[1]


def test_mistakes_in_unsupervised_text(build, text_flags, tiny_tokenizer, write_rows):
    with pytest.raises(ThreestepError, match="--unsupervised_dataset_name expects a dataset, but the name is empty"):
        build(TextArguments(), tiny_tokenizer, 8, seed=1)
    with pytest.raises(ThreestepError, match="unsupervised_dataset_name: 'missing.jsonl' does"):
        build(TextArguments("jsonl:missing.jsonl"), tiny_tokenizer, 8, seed=1)
    mistakes = Mistakes()
    TextArguments("jsonl:missing.jsonl").validate(mistakes)
    (sentence,) = mistakes.sentences
    assert "--unsupervised_dataset_name: 'missing.jsonl' does not exist" in sentence
    with pytest.raises(ThreestepError, match="fewer than one block of 500"):
        build(text_flags(["short"]), tiny_tokenizer, 500, seed=1)
    path = write_rows([{"text": "a"}, {"body": "b"}], "mixed.jsonl")
    with pytest.raises(ThreestepError, match="mixed.jsonl, line 2: no column 'text'.*--unsupervised_text_column"):
        build(TextArguments(f"jsonl:{path}"), tiny_tokenizer, 8, seed=1)


def test_text_from_every_reader(tmp_path, build, tiny_tokenizer, write_rows):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a b c d e f g h" * 3}, {"text": None}, {"text": "i j k" * 9}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    blocks = []
    for name in (f"jsonl:{write_rows(rows, 'texts.jsonl')}", f"parquet:{tmp_path}/rows.parquet"):
        built = build(TextArguments(name), tiny_tokenizer, 8, seed=1)
        blocks.append([row.input_ids.tolist() for row in built])
        assert built.manifest["splits"]["train"]["dropped"] == {"no_text": 1}
    assert blocks[0] == blocks[1] and len(blocks[0]) > 3


def test_the_same_blocks_for_any_workers_and_shards(flags, text_flags, tiny_tokenizer, monkeypatch):
    data, named = flags(), text_flags([f"text {i} " * (i % 5) for i in range(300)])
    found = []
    for length, num_workers in ((512, 1), (7, 1), (7, 3)):
        monkeypatch.setattr(shards, "_LEAST_ROWS", length)
        data.cache.num_workers = num_workers
        found.append(Path(build_unsupervised(named, data, tiny_tokenizer, 16, seed=1).path).read_bytes())
        shutil.rmtree(data.cache.cache_dir)
    assert found[0] == found[1] == found[2]


def test_rows_are_those_of_the_version_of_row_code(flags, write_rows):
    path = write_rows([{"text": row["prompt"] + row["chosen"]} for row in PAIRS], "texts.jsonl")
    blocks = build_unsupervised(TextArguments(f"jsonl:{path}"), flags(), byte_tokenizer(), 16, seed=1)
    compare("unsupervised", "ROWS", ([row.row_id, row.input_ids.tolist()] for row in blocks))


pytestmark = pytest.mark.unit


def test_the_pretraining_loss_by_hand():
    logprobs_M = torch.log(torch.tensor([0.5, 0.125])).requires_grad_()
    loss = pretraining_loss(logprobs_M, tokens_in_step=6)
    assert loss.item() == pytest.approx(4 * math.log(2) / 6)
    loss.backward()
    assert logprobs_M.grad.tolist() == pytest.approx([-1 / 6, -1 / 6])


@pytest.mark.parametrize("coefficient", [0.0, 2.0])
def test_texts_are_reported_before_their_coefficient_which_may_be_0(coefficient):
    """Two texts of 5 and 3 tokens, 6 predicted: the figure is their mean negative log-likelihood; at 0 the gradient is
    that without texts."""
    blocks = [TextBlock(0, np.array(ids, dtype=np.int32)) for ids in ([3, 9, 4, 8, 5], [7, 3, 6])]
    made, roles = random_experience(0), made_roles(with_critic=False)
    beside = text_batches(blocks, coefficient, roles.actor, SequenceLayout(PLANS[1], 0))
    figures = stepped(PLANS[1], made, roles, beside=beside, advantage="grpo")
    plain = tiny_causal_lm("llama", seed=1, dtype=torch.float64)
    texts = [torch.tensor(block.input_ids, dtype=torch.int64) for block in blocks]
    drawn = [(plain(ids[None]).logits[0, :-1], ids[1:, None]) for ids in texts]
    loss = -sum(logits.log_softmax(-1).gather(-1, ids).sum() for logits, ids in drawn) / 6
    assert figures["actor/pretraining_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    (coefficient * loss).backward()
    without = made_roles(with_critic=False)
    stepped(PLANS[1], made, without, advantage="grpo")
    own = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(roles.actor.gradient(), without.actor.gradient() + own, rtol=1e-6, atol=1e-10)


def test_a_run_that_resumes_goes_on_with_the_next_blocks():
    blocks = [TextBlock(row, np.full(4, row, dtype=np.int32)) for row in range(10)]
    actor = SimpleNamespace(ranks=SimpleNamespace(device=torch.device("cpu")))
    layout = SequenceLayout(PLANS[1], 0)

    def rows_of(learnt):
        taken = learnt.beside(4, actor, layout)
        return [number for batch in taken for number in batch.rows.input_ids_NT.flatten().tolist()]

    whole, stopped, resumed = (LearntTexts(blocks, 1.0, 7) for _ in range(3))
    first = [rows_of(whole), rows_of(whole)]
    assert rows_of(stopped) == first[0]
    resumed.load_state_dict(stopped.state_dict())
    assert rows_of(resumed) == first[1] != first[0]


def test_text_from_a_folder_and_from_the_training_split_of_the_hub(hub, build, tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"text": f"text {i}"} for i in range(50)])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "texts"))
    named = TextArguments(str(tmp_path / "texts"))
    assert len(build(named, tiny_tokenizer, 8, seed=1)) > 10
    with pytest.raises(ThreestepError, match="no column 'body', only text.*--unsupervised_text_column"):
        build(replace(named, unsupervised_text_column="body"), tiny_tokenizer, 8, seed=1)
    hub.splits = {"train": [{"text": "one two three four"}] * 3, "test": [{"text": "no"}]}
    blocks = build(TextArguments("hub:own/rows"), tiny_tokenizer, 4, seed=1)
    assert "no" not in "".join(tiny_tokenizer.decode(block.input_ids) for block in blocks) and len(blocks) >= 3
