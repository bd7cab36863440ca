"""A model is asked as its rows were: the style that the rows decide, and the prompts that chat makes of a question."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import with_flags
from tests.support.said import assistant, user
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow
from training.utils.data.build.build import build_phase, settle_style
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.chat.style import SavedStyle, adopt_style, parts_of_chat, save_style, saved_style

SPLITS = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}
QUESTIONS = [{"question": f"What is {i} + {i}?", "answer": f"It is {i}.", "rejected": "No."} for i in range(12)]
STORED = [{"prompt": f"{i} + {i} =", "chosen": f" {i}", "rejected": " no"} for i in range(12)]
WITH_BLANK = [{"prompt": f"{i} + {i} = ", "chosen": f"~{i}", "rejected": "~"} for i in range(12)]
# The blank and the answer's first word are one token, which is the answer's.
CROSSED = [{"prompt": f"{i} + {i} ", "chosen": f"is {i}", "rejected": "is no"} for i in range(12)]
WITH_LINES = [{"prompt": f"Q: {i}\nA:\n", "chosen": f"{i}", "rejected": "no"} for i in range(12)]
MESSAGES = [{"messages": [{"role": "user", "content": f"Hi {i}"}, assistant("Yes.")]} for i in range(12)]
TEXTS = [{"text": f"Once upon a time, {i}."} for i in range(12)]
# DeepSpeed-Chat's own classes, and Dahoas/rm-static.
SPACED = [{"prompt": f" Human: {i} + {i}? Assistant:", "chosen": f" {i}", "rejected": " no"} for i in range(12)]
IN_LINES = [{"prompt": f"\n\nHuman: {i}?\n\nAssistant:", "chosen": f" {i}", "rejected": " no"} for i in range(12)]
WRITTEN = [{"prompt": f"Human: {i}? Assistant:", "chosen": " yes", "rejected": " no"} for i in range(12)]


def settled(data, tokenizer, phase, said=None):
    """The rows, and the style that is saved in `tokenizer`, as a step makes them."""
    style = adopt_style(tokenizer, data.chat)
    data = with_flags(data, data_split=SPLITS[phase], eval_fraction=0.0)
    rows = build_phase(phase, data, tokenizer, 1).train
    most = data.rows.max_prompt_seq_len if phase == 3 else data.rows.max_seq_len
    said = [] if said is None else said
    return rows, settle_style(style, rows, tokenizer, said.append, most_tokens=most)


def prompt_ids(row):
    if isinstance(row, PromptRow):
        return row.flipped_prompt_ids[::-1].tolist()
    if isinstance(row, ResponsesRow):
        return row.prompt_ids.tolist()
    assert isinstance(row, SentenceRow)
    return row.input_ids[: int(np.argmax(row.loss_mask))].tolist()


@pytest.mark.parametrize(
    ("rows", "column", "name", "phases"),
    [
        (QUESTIONS, "question", "human_assistant", (1, 2, 3)),
        (QUESTIONS, "question", "chat_template", (1, 2, 3)),
        (STORED, "prompt", "as_stored", (1, 2, 3)),
        (WITH_BLANK, "prompt", "as_stored", (1, 2, 3)),
        (WITH_LINES, "prompt", "as_stored", (1, 2, 3)),
        (CROSSED, "prompt", "as_stored", (1, 2)),
    ],
)
def test_what_is_asked_has_the_ids_of_the_rows_prompt(flags, rows, column, name, phases):
    """A question as one types it: at a terminal without the blank or the line's end behind it."""
    for phase in phases:
        tokenizer = chat_tokenizer(chat_template("chatml") if name == "chat_template" else None)
        made, style = settled(flags(rows), tokenizer, phase)
        assert style.chat.prompt_style == saved_style(tokenizer).prompt_style == name
        maker = PromptMaker(flags(rows), tokenizer)
        for row in made:
            given = rows[row.row_id][column]
            for typed in {given.rstrip(), given} if rows is not CROSSED else {given.rstrip()}:
                asked = maker.make([{"role": "user", "content": typed}], None, 0)
                assert prompt_ids(asked) == prompt_ids(row), (typed, name)


@pytest.mark.parametrize("phase", [1, 2, 3])
@pytest.mark.parametrize("loss_on", ["response", "conversation"])
@pytest.mark.parametrize("rows", [SPACED, IN_LINES, WRITTEN])
def test_white_space_around_human_assistant_is_asked_as_trained(flags, rows, phase, loss_on, tmp_path):
    tokenizer, data = chat_tokenizer(None), flags(rows, loss_on=loss_on)
    made, _ = settled(data, tokenizer, phase)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    maker = PromptMaker(data, again)
    for row in made:
        text = rows[row.row_id]["prompt"]
        typed = text.split("Human: ")[1].rpartition("Assistant:")[0].rstrip()
        ids = prompt_ids(maker.make([user(typed)], None, 0))
        assert ids == tokenizer(text).input_ids
        assert loss_on == "conversation" or ids == prompt_ids(row)
    assert ("prompt_begin" in again.init_kwargs["threestep"]) == (rows is not WRITTEN)


def test_turns_are_apart_as_the_speakers_of_the_rows(flags):
    tokenizer = chat_tokenizer(None)
    settled(flags(IN_LINES), tokenizer, 1)
    asked = PromptMaker(flags(), tokenizer).make([user("Hi"), assistant("Yes?"), user("2?")], None, 0)
    assert asked.prompt_text == "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: 2?\n\nAssistant:"


def test_rows_with_other_white_space_than_the_models_are_a_warning(flags):
    tokenizer, said = chat_tokenizer(None), []
    settled(flags(SPACED), tokenizer, 1, said)
    settled(flags(SPACED), tokenizer, 2, said)
    assert not any("warning" in line for line in said)
    settled(flags(QUESTIONS), tokenizer, 3, said)
    assert said[-2] == (
        "warning: the rows' prompts are 'Human: ... Assistant:', but the model was trained on "
        "' Human: ... Assistant:'; use one form for all rows"
    )
    assert saved_style(tokenizer).frame == ("", " Assistant:")


@pytest.mark.parametrize(
    ("rows", "name"),
    [(MESSAGES, "human_assistant"), (WRITTEN, "human_assistant"), (TEXTS, "as_stored"), (STORED, "as_stored")],
)
def test_the_rows_decide_and_the_log_says_why(flags, rows, name):
    said: list[str] = []
    tokenizer = chat_tokenizer(None)
    data = flags(rows)
    before = parts_of_chat(data.chat, tokenizer, True)
    settled(data, tokenizer, 1, said)
    form = {"human_assistant": "use 'Human: ... Assistant:'", "as_stored": "use prompts as stored"}[name]
    reason = f"the tokenizer has no chat template, and the rows {form}"
    assert said == [f"prompt style: {name}, responses end with <|endoftext|> ({reason})"]
    assert saved_style(tokenizer).prompt_style == name
    assert (
        parts_of_chat(data.chat, tokenizer, True) == before == {"prompt_style": "human_assistant"}
    )  # caches of before


def test_texts_of_conversations_are_no_texts_as_stored(flags):
    rows = [{"text": f"Human: {i}? Assistant: Yes. Human: Sure? Assistant: No."} for i in range(8)]
    assert settled(flags(rows), chat_tokenizer(None), 1)[1].chat.prompt_style == "human_assistant"
    whole = flags(WRITTEN, loss_on="conversation")
    assert settled(whole, chat_tokenizer(None), 1)[1].chat.prompt_style == "human_assistant"


def test_rows_that_were_cut_at_their_beginning_are_known_by_their_end(flags):
    rows = [{"prompt": f"Human: {'so ' * 200}{i}? Assistant:", "chosen": " yes"} for i in range(8)]
    data = flags(rows, max_seq_len=40, truncation="left")
    assert settled(data, chat_tokenizer(None), 1)[1].chat.prompt_style == "human_assistant"
    other = [{"prompt": f"User: {i}? Assistant:", "chosen": " yes"} for i in range(8)]
    assert settled(flags(other), chat_tokenizer(None), 1)[1].chat.prompt_style == "as_stored"


def test_rows_of_both_styles_are_a_warning_with_what_to_do(flags, write_rows):
    said: list[str] = []
    paths = [f"jsonl:{write_rows(rows, name)}" for rows, name in ((STORED, "a.jsonl"), (WRITTEN[:5], "b.jsonl"))]
    _, style = settled(flags(data_path=paths), chat_tokenizer(None), 1, said)
    assert style.chat.prompt_style == "as_stored" and said[1:] == [
        "warning: 5 of 17 inspected rows use 'Human: ... Assistant:', but the model is saved with the style "
        "as_stored, so its prompts will look different; use one form for all rows"
    ]


def test_a_flag_decides_and_rows_of_another_style_are_a_warning(flags):
    said: list[str] = []
    _, style = settled(flags(STORED, prompt_style="human_assistant"), chat_tokenizer(None), 1, said)
    assert style.chat.prompt_style == "human_assistant" and said == [
        "warning: 12 of 12 inspected rows use prompts as stored, but the model is saved with the style "
        "human_assistant, so its prompts will look different; --prompt_style as_stored matches the rows"
    ]


def test_a_model_of_before_keeps_its_style_until_rows_say_otherwise(flags):
    """Opened for questions, it is asked as it was saved; trained on, it is asked as the new rows were."""
    tokenizer = chat_tokenizer(None)
    save_style(tokenizer, SavedStyle("human_assistant"))
    assert adopt_style(tokenizer, flags().chat).chat.prompt_style == "human_assistant"
    said: list[str] = []
    _, style = settled(flags(WRITTEN), tokenizer, 3, said)
    assert style.reason.startswith("saved with ") and len(said) == 1
    _, style = settled(flags(STORED), tokenizer, 3, said)
    assert style.chat.prompt_style == saved_style(tokenizer).prompt_style == "as_stored"
    assert said[-1] == style.sentence
    assert style.sentence.startswith("warning: prompt style: as_stored, responses end with ")
    assert style.reason == (
        "the rows use prompts as stored, but the model was trained with human_assistant; to read rows in that style: "
        "--data_format question_answer --prompt_column prompt --chosen_column chosen --rejected_column rejected"
    )


def test_a_resumed_run_keeps_its_style_and_finds_the_end_of_prompts_again(flags):
    tokenizer, data = chat_tokenizer(None), flags(WITH_BLANK)
    style = adopt_style(tokenizer, data.chat, began_with="as_stored")
    rows = build_phase(1, data, tokenizer, 1).train
    again = settle_style(style, rows, tokenizer, lambda line: None, most_tokens=512)
    assert again.reason == "as when the run started" and saved_style(tokenizer) == SavedStyle("as_stored")
    assert saved_style(tokenizer).prompt_end == " "


def test_turns_and_system_prompts_of_prompts_as_stored(flags):
    tokenizer = chat_tokenizer(None)
    save_style(tokenizer, SavedStyle("as_stored"))
    maker = PromptMaker(flags(), tokenizer)
    talk = [
        user("1 ="),
        assistant(" 1"),
        user("2 ="),
    ]
    assert maker.make(talk, None, 0).prompt_text == "2 ="
    with pytest.raises(ThreestepError, match="expected no system prompt, .* got one; move it into the question"):
        maker.make([{"role": "system", "content": "Be brief."}, *talk], None, 0)
