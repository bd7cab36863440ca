"""The table of kinds, and rows of marked responses."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from training.utils.contracts.rows import PHASES
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.table import KINDS, kind_of


def test_each_phase_has_a_kind():
    assert [kind_of(phase).name for phase in PHASES] == ["sentences", "ranked", "prompts"]
    assert [kind_of(phase).phase for phase in PHASES] == list(PHASES)
    assert kind_of("ranked") is kind_of(2) and len({kind.key for kind in KINDS.values()}) == len(KINDS)


def test_marked_responses(flags, tiny_tokenizer):
    rows = [{"prompt": f"Say {i}.", "completion": f" {i}", "label": i % 2 == 0} for i in range(12)]
    data = flags(rows, data_split="0,1,0", eval_fraction=0.0)
    built = build_phase("marked", data, tiny_tokenizer, seed=1)
    texts = {tiny_tokenizer.decode(row.response_ids[0][:-1]) for row in built.train}
    assert texts == {f" {i}" for i in range(12)} and "phase2_marked" in built.train.path
    for row in built.train:
        number = int(tiny_tokenizer.decode(row.response_ids[0][:-1]))
        assert row.is_good is (number % 2 == 0) and row.margins is None and row.batched == ("is_good",)
    assert list(built.train.values("is_good")) == [row.is_good for row in built.train]
    assert build_phase("marked", data, tiny_tokenizer, seed=1).report.resumed


def test_rows_without_a_mark_are_dropped_with_the_kinds_advice(flags, tiny_tokenizer):
    data = flags([{"prompt": "a", "completion": "b"}] * 3, data_split="0,1,0", eval_fraction=0.0)
    with pytest.raises(
        Exception, match=r"all 3 rows of .* were dropped \(3 unmarked\); each response needs a mark of its own"
    ):
        build_phase("marked", data, tiny_tokenizer, seed=1)


def test_pairs_are_no_marked_responses(flags, tiny_tokenizer):
    with pytest.raises(Exception, match=r"a pair is written as two rows"):
        build_phase("marked", flags(data_split="0,1,0"), tiny_tokenizer, seed=1)


def test_marked_conversations(flags):
    """Marks of chats, under a chat template; a bad answer is read as a good one is."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say {i}."}],
            "completion": [{"role": "assistant", "content": f"{i}"}],
            "label": i % 3 == 0,
        }
        for i in range(9)
    ]
    tokenizer = chat_tokenizer(chat_template("chatml"))
    data = flags(rows, data_split="0,1,0", eval_fraction=0.0, prompt_style="chat_template")
    built = build_phase("marked", data, tokenizer, seed=1)
    assert sorted(row.is_good for row in built.train) == [False] * 6 + [True] * 3
    assert all(len(row.response_ids) == 1 for row in built.train)
