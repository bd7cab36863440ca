"""Conversations that end with a question: step 1 learns their last answer, as texts and under a chat template."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from training.utils.data.build import build as building
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.kind import UNANSWERED


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ASKED, ANSWERED = ("user", "Hi"), ("assistant", "Yes?")
GOES_ON = messages(ASKED, ANSWERED, ("user", "Thanks"))
ALIKE = messages(ASKED, ANSWERED)


def test_as_text_it_is_the_conversation_up_to_the_last_answer(build, tiny_tokenizer, monkeypatch):
    """The very tokens of the conversation that ends there; what has no answer is left out. Step 3 asks on."""
    lines: list[str] = []
    rows = [GOES_ON, ALIKE, messages(ASKED), messages(("system", "Be brief."), ASKED, ANSWERED, ASKED, ANSWERED, ASKED)]
    built = build(1, rows, log=lines.append)
    first, second, last = built.train
    assert first.input_ids.tolist() == second.input_ids.tolist() and built.report.train.dropped == {"no_chosen": 1}
    assert tiny_tokenizer.decode(first.input_ids) == "Human: Hi Assistant: Yes?<|endoftext|>"
    whole = "System: Be brief. Human: Hi Assistant: Yes? Human: Hi Assistant: Yes?<|endoftext|>"
    assert tiny_tokenizer.decode(last.input_ids) == whole and last.loss_mask.sum() == first.loss_mask.sum()
    assert built.report.train.noted == {UNANSWERED: 2} and any(f"2 {UNANSWERED}" in line for line in lines)
    (asked,) = build(3, [GOES_ON]).train
    assert asked.prompt_text == "Human: Hi Assistant: Yes? Human: Thanks Assistant:"
    monkeypatch.setattr("training.utils.data.file_dataset.FileDataset.format", property(lambda self: 1 / 0))
    again = build(1, rows)  # found in the cache without a look at the files
    assert again.report.resumed and again.train.manifest["fingerprint"] == built.train.manifest["fingerprint"]


def test_under_a_template_it_keeps_all_of_them_and_is_counted(build):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    built = build(1, [GOES_ON, ALIKE], tokenizer, prompt_style="auto")
    assert built.report.train.noted == {UNANSWERED: 1}
    assert [tokenizer.decode(row.input_ids[row.loss_mask]) for row in built.train] == ["Yes?<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [({"content": "Yes?", "weight": 0}, "no_turn_to_train"), ({"content": " "}, "empty_response")],
)
def test_an_answer_that_carries_no_loss_leaves_nothing(build, answer, reason):
    row = messages(ASKED, ANSWERED, ("user", "?"))
    row["messages"][1] |= answer
    assert build(1, [row, ALIKE]).report.train.dropped == {reason: 1}


def test_a_cache_of_an_earlier_version_is_read_as_it_is(build, monkeypatch):
    """It was built without such rows, under a fingerprint that says nothing of them; so are rows of other files now."""
    with monkeypatch.context() as earlier:
        earlier.setattr(building, "_is_new_to_cache", lambda *given: False)
        old = build(1, [GOES_ON, ALIKE])
    assert len(old.train) == 1 and old.report.train.dropped == {"no_chosen": 1}
    again = build(1, [GOES_ON, ALIKE])
    assert again.report.resumed and again.train.manifest["fingerprint"] == old.train.manifest["fingerprint"]
    anew = build(1, [GOES_ON, ALIKE], rebuild_cache=True)
    assert len(anew.train) == 2 and anew.train.manifest["fingerprint"] != old.train.manifest["fingerprint"]


def test_of_a_class_with_messages(own, tiny_tokenizer):
    data = own(
        rows=[GOES_ON, ALIKE],
        get_messages=lambda self, sample: sample["messages"],
        get_prompt=lambda self, sample: None,
        data_split="1,0,0",
        eval_fraction=0.0,
    )
    row = build_phase(1, data, tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids) == "Human: Hi Assistant: Yes?<|endoftext|>"
