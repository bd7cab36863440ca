"""A prompt made while training runs is the row that the dataset's builder would have made of it."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.build.row_maker import PromptMaker

TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]
ROWS = [{"prompt": "Human: 1? Assistant:", "ground_truth": 1, "level": "x"}, {"prompt": TALK, "ground_truth": "2"}]


@pytest.mark.parametrize("style", ["human_assistant", "chat_template"])
def test_the_same_row_as_the_builders(flags, tiny_tokenizer, style):
    tokenizer = tiny_tokenizer if style == "human_assistant" else chat_tokenizer(chat_template("chatml"))
    for given in ROWS:
        data = flags([given], data_split="0,0,1", eval_fraction=0.0, prompt_style=style, return_columns=["raw_prompt"])
        (built,) = build_phase(3, data, tokenizer, seed=1).train
        row = PromptMaker(data, tokenizer).make(given["prompt"], given["ground_truth"], -1, level=given.get("level"))
        assert row.flipped_prompt_ids.tolist() == built.flipped_prompt_ids.tolist()
        assert (row.prompt_text, row.reference, row.uid, row.row_id) == (
            built.prompt_text, built.reference, built.uid, -1,
        )  # fmt: skip
        assert row.columns == {"level": None, **built.columns, "data_source": "generated"}


def test_what_would_be_left_out_is(flags, tiny_tokenizer):
    maker = PromptMaker(flags(max_prompt_seq_len=5), tiny_tokenizer)
    assert maker.make("7 " * 20, None, -1) is None and maker.make("", None, -1) is None
    assert maker.counts.dropped == {"prompt_too_long": 1, "empty_prompt": 1}
    strict = PromptMaker(flags(max_prompt_seq_len=5, prompt_truncation="error"), tiny_tokenizer)
    with pytest.raises(ThreestepError, match="dataset 'generated', row id -3: a prompt of .* tokens"):
        strict.make("7 " * 20, None, -3)


def test_a_source_of_its_own(flags, tiny_tokenizer):
    row = PromptMaker(flags(), tiny_tokenizer).make("a", None, -1, data_source="self-play")
    assert row.columns == {"data_source": "self-play"}
    with pytest.raises(ThreestepError, match="a generated prompt, message 1: expected an object, got text"):
        PromptMaker(flags(), tiny_tokenizer).make(["hi"], None, -1)
