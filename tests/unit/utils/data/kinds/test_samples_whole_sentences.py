"""Classes that make their own sentences, prompt and response in one text, as DeepSpeed-Chat's do."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.samples import prompt_of_sentences

TALK = "Human: Hi Assistant: Yes? Human: Two and two? Assistant:"
ONLY_SENTENCES = {
    "get_prompt": lambda self, sample: None,
    "get_chosen": lambda self, sample: None,
    "get_rejected": lambda self, sample: None,
    "get_prompt_and_chosen": lambda self, sample: f"{TALK} four",
    "get_prompt_and_rejected": lambda self, sample: f"{TALK} five",
}


@pytest.mark.parametrize(
    ("sentences", "prompt"),
    [
        ([f"{TALK} four"], TALK),
        ([f"{TALK} four", f"{TALK} five"], TALK),
        # They part before the last turn: what both have said until then is the prompt.
        ([f"{TALK} four", "Human: Hi Assistant: Oh. Human: Two and two? Assistant: four"], "Human: Hi Assistant:"),
        (["2 + 2 = 4"], ""),
        (["2 + 2 = 4", "2 + 2 = 5"], "2 + 2 ="),
        (["word", "wood"], ""),
    ],
)
def test_the_prompt_of_sentences(sentences, prompt):
    assert prompt_of_sentences(sentences) == prompt


def test_a_class_that_knows_sentences_alone_serves_steps_1_and_2(own, tiny_tokenizer):
    """All that DeepSpeed-Chat's steps 1 and 2 call; step 3 needs prompts."""
    row = build_phase(1, own(**ONLY_SENTENCES, data_split="1,0,0"), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids[row.loss_mask]) == " four<|endoftext|>"
    assert tiny_tokenizer.decode(row.input_ids[~row.loss_mask]) == TALK
    row = build_phase(2, own(**ONLY_SENTENCES, data_split="0,1,0"), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.prompt_ids) == TALK
    assert [tiny_tokenizer.decode(ids[:-1]) for ids in row.response_ids] == [" four", " five"]
    with pytest.raises(ThreestepError, match="dropped .*no_prompt"):
        build_phase(3, own(**ONLY_SENTENCES, data_split="0,0,1"), tiny_tokenizer, 1)


def test_without_a_rejected_sentence_a_row_is_no_pair(own, tiny_tokenizer):
    members = {**ONLY_SENTENCES, "get_prompt_and_rejected": lambda self, sample: None}
    with pytest.raises(ThreestepError, match="dropped .*no_rejected"):
        build_phase(2, own(**members, data_split="0,1,0"), tiny_tokenizer, 1)


def test_sentences_that_contradict_the_parts_are_counted_and_said(own, tiny_tokenizer):
    rows = [{"p": f"Human: {i}? Assistant:", "c": f" {i}", "r": " no"} for i in range(20)]
    said: list[str] = []
    data = own(
        rows=rows,
        get_prompt_and_chosen=lambda self, sample: (" " if sample["c"] == " 3" else "") + sample["p"] + sample["c"],
        data_split="1,0,0",
        eval_fraction=0.0,
    )
    built = build_phase(1, data, tiny_tokenizer, 1, log=said.append)
    assert built.report.train.noted == {"with the parts, because the sentence does not begin with the prompt": 1}
    assert "1 with the parts, because the sentence does not begin with the prompt, none dropped" in said[-1]
    assert build_phase(3, own(rows=rows, data_split="0,0,1"), tiny_tokenizer, 1).report.train.noted == {}
