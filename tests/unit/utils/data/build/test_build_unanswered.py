"""Conversations that end with a question: step 1 learns their last answer, as texts and under a chat template."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from training.utils.data.build import build
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.kind import UNANSWERED


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ASKED, ANSWERED = ("user", "Hi"), ("assistant", "Yes?")
GOES_ON = messages(ASKED, ANSWERED, ("user", "Thanks"))
ALIKE = messages(ASKED, ANSWERED)
ALL = {"data_split": "1,0,0", "eval_fraction": 0.0}


def learnt(built, tokenizer):
    return [(tokenizer.decode(row.input_ids), tokenizer.decode(row.input_ids[row.loss_mask])) for row in built.train]


def test_as_text_it_is_the_conversation_up_to_the_last_answer(flags, tiny_tokenizer):
    """The very tokens of the conversation that ends there; what has no answer is left out."""
    lines: list[str] = []
    rows = [GOES_ON, ALIKE, messages(ASKED), messages(("system", "Be brief."), ASKED, ANSWERED, ASKED, ANSWERED, ASKED)]
    built = build_phase(1, flags(rows, **ALL), tiny_tokenizer, 1, log=lines.append)
    first, second, last = (row.input_ids.tolist() for row in built.train)
    assert first == second and built.report.train.dropped == {"no_chosen": 1}
    texts = [text for text, _ in learnt(built, tiny_tokenizer)]
    assert texts[0] == "Human: Hi Assistant: Yes?<|endoftext|>"
    assert texts[2] == "System: Be brief. Human: Hi Assistant: Yes? Human: Hi Assistant: Yes?<|endoftext|>"
    assert built.train[2].loss_mask.sum() == built.train[0].loss_mask.sum()
    assert built.report.train.noted == {UNANSWERED: 2} and any(f"2 {UNANSWERED}" in line for line in lines)


def test_under_a_template_it_keeps_all_of_them_and_is_counted(flags):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    built = build_phase(1, flags([GOES_ON, ALIKE], **ALL), tokenizer, 1)
    assert built.report.train.noted == {UNANSWERED: 1}
    one, other = (trained for _, trained in learnt(built, tokenizer))
    assert one == other == "Yes?<|im_end|>"


def test_steps_2_and_3_read_such_rows_as_before(flags, tiny_tokenizer):
    built = build_phase(3, flags([GOES_ON], data_split="0,0,1", eval_fraction=0.0), tiny_tokenizer, 1)
    assert built.train[0].prompt_text == "Human: Hi Assistant: Yes? Human: Thanks Assistant:"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [({"content": "Yes?", "weight": 0}, "no_turn_to_train"), ({"content": " "}, "empty_response")],
)
def test_an_answer_that_carries_no_loss_leaves_nothing(flags, tiny_tokenizer, answer, reason):
    row = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", **answer},
            {"role": "user", "content": "?"},
        ]
    }
    built = build_phase(1, flags([row, ALIKE], **ALL), tiny_tokenizer, 1)
    assert built.report.train.dropped == {reason: 1}


def test_a_cache_of_an_earlier_version_is_read_as_it_is(flags, tiny_tokenizer, monkeypatch):
    """It was built without such rows, under a fingerprint that says nothing of them; so are rows of other files now."""
    data = flags([GOES_ON, ALIKE], **ALL)
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "_is_new_to_cache", lambda *given: False)
        old = build_phase(1, data, tiny_tokenizer, 1)
    assert len(old.train) == 1 and old.report.train.dropped == {"no_chosen": 1}
    again = build_phase(1, data, tiny_tokenizer, 1)
    assert again.report.resumed and again.train.manifest["fingerprint"] == old.train.manifest["fingerprint"]
    anew = build_phase(1, flags([GOES_ON, ALIKE], **ALL, rebuild_cache=True), tiny_tokenizer, 1)
    assert len(anew.train) == 2 and anew.train.manifest["fingerprint"] != old.train.manifest["fingerprint"]


def test_it_is_found_in_the_cache_without_a_look_at_the_files(flags, tiny_tokenizer, monkeypatch):
    built = build_phase(1, flags([GOES_ON, ALIKE], **ALL), tiny_tokenizer, 1)
    monkeypatch.setattr("training.utils.data.file_dataset.FileDataset.format", property(lambda self: 1 / 0))
    again = build_phase(1, flags([GOES_ON, ALIKE], **ALL), tiny_tokenizer, 1)
    assert again.report.resumed and again.train.manifest["fingerprint"] == built.train.manifest["fingerprint"]


def test_of_a_class_with_messages(own, tiny_tokenizer):
    data = own(
        rows=[GOES_ON, ALIKE],
        get_messages=lambda self, sample: sample["messages"],
        get_prompt=lambda self, sample: None,
        **ALL,
    )
    built = build_phase(1, data, tiny_tokenizer, 1)
    assert [text for text, _ in learnt(built, tiny_tokenizer)][0] == "Human: Hi Assistant: Yes?<|endoftext|>"
