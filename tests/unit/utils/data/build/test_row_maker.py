"""The rows of each phase from plain text, and prompts made while training runs: what is cut and dropped."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.pair_rows import PAIR, all_rows, many
from tests.support.said import assistant, user
from training.utils.base.errors import ThreestepError
from training.utils.data.build import build as building
from training.utils.data.build import row_maker
from training.utils.data.build.build import build_phase
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.kinds.kind import UNANSWERED, PlainText

END = "<|endoftext|>"


def test_the_rows_of_a_pair(build, tiny_tokenizer):
    def text(ids):
        return tiny_tokenizer.decode(ids)

    (row,) = build(1, [PAIR]).train
    assert text(row.input_ids) == PAIR["prompt"] + PAIR["chosen"] + END
    assert text(row.input_ids[row.loss_mask]) == PAIR["chosen"] + END
    (everywhere,) = build(1, [PAIR], loss_on="conversation").train
    assert everywhere.loss_mask.tolist() == [False] + [True] * (len(row.input_ids) - 1)
    (row,) = build(2, [PAIR]).train
    assert text(row.prompt_ids) == PAIR["prompt"]
    assert [text(ids) for ids in row.response_ids] == [PAIR["chosen"] + END, PAIR["rejected"] + END]
    (row,) = build(3, [PAIR]).train
    assert text(row.flipped_prompt_ids[::-1]) == PAIR["prompt"] == row.prompt_text and row.reference is None


def test_eos_carries_loss_where_pad_is_eos(build, tiny_tokenizer_pad_is_eos):
    tokenizer = tiny_tokenizer_pad_is_eos
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    for row in build(1, tokenizer=tokenizer).train:
        assert row.input_ids[-1] == tokenizer.eos_token_id and row.loss_mask[-1]


def test_long_texts_are_tokenized_few_at_a_time(build, monkeypatch, tmp_path):
    """An encoding takes some hundred bytes a token: a thousand rows of a million characters took all memory."""
    calls: list[int] = []
    encode = PlainText.encode
    monkeypatch.setattr(PlainText, "encode", lambda self, samples: calls.append(len(samples)) or encode(self, samples))
    built = []
    for most in (row_maker.CHARACTERS_PER_CALL, 1):
        monkeypatch.setattr(row_maker, "CHARACTERS_PER_CALL", most)
        made = build(1, many(PAIR, 12), data_output_path=str(tmp_path / str(most)))
        built.append([row.input_ids.tolist() for row in all_rows(made)])
    assert calls == [12, *[1] * 12] and built[0] == built[1]


@pytest.mark.parametrize(
    ("phase", "row", "reason"),
    [
        (1, {"chosen": None}, "no_chosen"),
        (1, {"prompt": None}, "no_prompt"),
        (2, {"rejected": None}, "no_rejected"),
        (2, {"prompt": ""}, "empty_prompt"),
        (3, {"prompt": ""}, "empty_prompt"),
        (3, {"prompt": " \n"}, "empty_prompt"),
        (3, {"prompt": "Human:  Assistant:"}, "empty_prompt"),
        (1, {"chosen": "  "}, "empty_response"),
        (2, {"rejected": ""}, "empty_response"),
        (2, {"rejected": PAIR["chosen"]}, "identical_responses"),
        (1, {"prompt": "x " * 100}, "response_cut_to_nothing"),
        (3, {"prompt": "x " * 100}, "prompt_too_long"),
    ],
)
def test_what_cannot_serve_is_dropped_and_counted(build, phase, row, reason):
    built = build(phase, [PAIR, {**PAIR, **row}], max_seq_len=60, max_prompt_seq_len=60)
    assert len(built.train) == 1 and built.report.train.dropped == {reason: 1}
    assert f"dropped: 1 {reason}" in built.report.sentence


LONG = {"prompt": "Human: " + "7 " * 20 + "Assistant:", "chosen": " yes" * 10, "rejected": " no" * 20}


@pytest.mark.parametrize("truncation", ["right", "left", "middle"])
@pytest.mark.parametrize("phase", [1, 2])
def test_truncation_is_counted_and_keeps_within_the_length(build, tiny_tokenizer, truncation, phase):
    built = build(phase, [PAIR, LONG], max_seq_len=70, truncation=truncation)
    assert built.report.train.truncated == 1 and built.report.train.dropped == {}
    row = built.train[1]
    if phase == 1:
        assert len(row.input_ids) == 70
        text = tiny_tokenizer.decode(row.input_ids)
        assert text.endswith(END) == (truncation != "right")  # a cut text does not end there
        assert row.loss_mask[-1] and row.loss_mask.any()
    else:
        assert max(len(row.prompt_ids) + len(ids) for ids in row.response_ids) == 70
        assert all(ids[-1] == tiny_tokenizer.eos_token_id for ids in row.response_ids)


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_how_long_prompts_are_cut(build, tiny_tokenizer, truncation):
    text = "9 8 7 6 5 4 3 2 1 0"
    whole = tiny_tokenizer(text)["input_ids"]
    built = build(3, [{"prompt": text}], max_prompt_seq_len=7, prompt_truncation=truncation)
    # verl's cuts: the last 7, the first 7, or the first 7 // 2 and the last 7 - 7 // 2
    kept = {"left": whole[-7:], "right": whole[:7], "middle": whole[:3] + whole[-4:]}[truncation]
    assert built.train[0].flipped_prompt_ids[::-1].tolist() == kept != whole
    assert built.report.train.truncated == 1 and built.train[0].prompt_text == text


def test_long_prompts_are_filtered_in_parallel_and_counted(build):
    rows = [{"prompt": f"{i}" + " 7" * (60 if i % 3 == 0 else 1)} for i in range(2100)]
    built = build(3, rows, max_prompt_seq_len=20, num_workers=2)
    assert built.report.train.dropped == {"prompt_too_long": 700} and len(built.train) == 1400
    assert "1,400 rows" in built.report.sentence and "dropped: 700 prompt_too_long" in built.report.sentence
    assert [row.row_id for row in built.train] == [i for i in range(2100) if i % 3]


def test_truncation_error_names_the_row(build):
    with pytest.raises(ThreestepError, match=r"row id 1: a sentence has \d+ tokens, but --max_seq_len is 70"):
        build(1, [PAIR, LONG], max_seq_len=70, truncation="error")
    with pytest.raises(ThreestepError, match=r"row id 1: a prompt has \d+ tokens, but --max_prompt_seq_len is 40"):
        build(3, [PAIR, LONG], max_prompt_seq_len=40, prompt_truncation="error")


def test_raw_ids_raw_chat_and_full_prompt_on_request(build):
    rows = [{"prompt": [{"role": "user", "content": "Hi " * 9}]}, {"prompt": "Human: Hi Assistant:"}]
    cut = {"max_prompt_seq_len": 6, "prompt_truncation": "left"}
    assert build(3, rows[:1], **cut).train[0].columns.keys() == {"data_source"}
    built = build(3, rows[:1], **cut, return_columns=["raw_prompt_ids", "raw_prompt", "full_prompts"])
    assert not built.report.from_cache
    (row,) = built.train
    assert row.columns["raw_prompt_ids"] == row.flipped_prompt_ids[::-1].tolist() and row.length_tokens == 6
    assert row.columns["raw_prompt"] == rows[0]["prompt"]
    assert row.columns["full_prompts"] == f"Human: {'Hi ' * 9} Assistant:" == row.prompt_text
    (text,) = build(3, rows[1:], return_columns=["raw_prompt"]).train
    assert text.columns["raw_prompt"] == [user("Hi")]


def test_rows_for_which_a_class_returns_images_are_refused_by_name(own, tiny_tokenizer):
    for phase in (1, 2, 3):
        data = own(get_images=lambda self, sample: [b"a picture"])
        said = r"dataset 'own', row \d+: get_images returned images, but only text is"
        with pytest.raises(ThreestepError, match=said):
            build_phase(phase, data, tiny_tokenizer, seed=1)


# --- a prompt made while training runs

TALK = [user("one"), assistant("1"), user("two")]
ROWS = [{"prompt": "Human: 1? Assistant:", "ground_truth": 1, "level": "x"}, {"prompt": TALK, "ground_truth": "2"}]


@pytest.mark.parametrize("style", ["human_assistant", "chat_template"])
def test_a_prompt_made_later_is_the_same_row(build, flags, tiny_tokenizer, style):
    tokenizer = tiny_tokenizer if style == "human_assistant" else chat_tokenizer(chat_template("chatml"))
    asked = {"prompt_style": style, "return_columns": ["raw_prompt"]}
    maker = PromptMaker(flags(**asked), tokenizer)
    for given in ROWS:
        (built,) = build(3, [given], tokenizer, **asked).train
        row = maker.make(given["prompt"], given["ground_truth"], -1, level=given.get("level"))
        assert row.flipped_prompt_ids.tolist() == built.flipped_prompt_ids.tolist() and row.row_id == -1
        assert (row.prompt_text, row.reference, row.uid) == (built.prompt_text, built.reference, built.uid)
        assert row.columns == {"level": None, **built.columns, "data_source": "generated"}
    assert maker.make("a", None, -1, data_source="self-play").columns["data_source"] == "self-play"


def test_what_would_be_left_out_is(flags, tiny_tokenizer):
    maker = PromptMaker(flags(max_prompt_seq_len=5), tiny_tokenizer)
    assert maker.make("7 " * 20, None, -1) is None and maker.make("", None, -1) is None
    assert maker.counts.dropped == {"prompt_too_long": 1, "empty_prompt": 1}
    strict = PromptMaker(flags(max_prompt_seq_len=5, prompt_truncation="error"), tiny_tokenizer)
    with pytest.raises(ThreestepError, match="dataset 'generated', row id -3: a prompt has .* tokens"):
        strict.make("7 " * 20, None, -3)
    with pytest.raises(ThreestepError, match="a generated prompt, message 1: expected an object, got text"):
        strict.make(["hi"], None, -1)


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
    assert again.report.from_cache and again.train.manifest["fingerprint"] == built.train.manifest["fingerprint"]


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
    assert again.report.from_cache and again.train.manifest["fingerprint"] == old.train.manifest["fingerprint"]
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
