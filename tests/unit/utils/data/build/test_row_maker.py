"""The rows of each phase from plain text: their tokens and loss, what is cut, dropped and counted."""

from __future__ import annotations

import pytest

from tests.support.data_flags import with_flags
from tests.support.pair_rows import PAIR, all_rows, many
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow
from training.utils.data.build import row_maker
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.kind import PlainText


def test_phase_1_is_a_sentence(flags, tiny_tokenizer):
    row = build_phase(1, flags([PAIR] * 9), tiny_tokenizer, seed=1).train[0]
    assert isinstance(row, SentenceRow)
    assert tiny_tokenizer.decode(row.input_ids) == PAIR["prompt"] + PAIR["chosen"] + "<|endoftext|>"


def test_loss_falls_on_the_response_alone(flags, tiny_tokenizer):
    row = build_phase(1, flags([PAIR] * 9), tiny_tokenizer, seed=1).train[0]
    assert tiny_tokenizer.decode(row.input_ids[row.loss_mask]) == PAIR["chosen"] + "<|endoftext|>"
    everywhere = build_phase(1, flags([PAIR] * 9, loss_on="conversation"), tiny_tokenizer, seed=1).train[0]
    assert everywhere.loss_mask.tolist() == [False] + [True] * (len(row.input_ids) - 1)


def test_eos_carries_loss_where_pad_is_eos(flags, tiny_tokenizer_pad_is_eos):
    tokenizer = tiny_tokenizer_pad_is_eos
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    for row in all_rows(build_phase(1, flags(), tokenizer, seed=1)):
        assert row.input_ids[-1] == tokenizer.eos_token_id and row.loss_mask[-1]


def test_phase_2_is_a_prompt_and_ranked_responses(flags, tiny_tokenizer):
    row = build_phase(2, flags([PAIR] * 9), tiny_tokenizer, seed=1).train[0]
    assert isinstance(row, ResponsesRow)
    assert tiny_tokenizer.decode(row.prompt_ids) == PAIR["prompt"]
    texts = [tiny_tokenizer.decode(ids) for ids in row.response_ids]
    assert texts == [PAIR["chosen"] + "<|endoftext|>", PAIR["rejected"] + "<|endoftext|>"]


def test_phase_3_is_a_flipped_prompt(flags, tiny_tokenizer):
    row = build_phase(3, flags([PAIR] * 9), tiny_tokenizer, seed=1).train[0]
    assert isinstance(row, PromptRow)
    assert tiny_tokenizer.decode(row.flipped_prompt_ids[::-1]) == PAIR["prompt"] == row.prompt_text
    assert row.reference is None


def test_long_texts_are_tokenized_few_at_a_time(flags, tiny_tokenizer, monkeypatch, tmp_path):
    """An encoding takes some hundred bytes a token: a thousand rows of a million characters took all memory."""
    calls: list[int] = []
    encode = PlainText.encode
    monkeypatch.setattr(PlainText, "encode", lambda self, samples: calls.append(len(samples)) or encode(self, samples))
    built = []
    for most in (row_maker.CHARACTERS_PER_CALL, 1):
        monkeypatch.setattr(row_maker, "CHARACTERS_PER_CALL", most)
        data = flags(many(PAIR, 12), data_split="1,0,0", eval_fraction=0.0, data_output_path=str(tmp_path / str(most)))
        built.append([row.input_ids.tolist() for row in all_rows(build_phase(1, data, tiny_tokenizer, seed=1))])
    assert calls == [12, *[1] * 12] and built[0] == built[1]


def test_rows_without_rejected_leave_phase_2_alone(flags, tiny_tokenizer):
    rows = [{**row, "rejected": row["rejected"] if i % 2 else None} for i, row in enumerate(many(PAIR, 40))]
    only_1, only_2 = (flags(rows, data_split=split, eval_fraction=0.0) for split in ("1,0,0", "0,1,0"))
    assert len(build_phase(1, only_1, tiny_tokenizer, seed=1).train) == 40
    built = build_phase(2, only_2, tiny_tokenizer, seed=1)
    assert len(built.train) == 20 and built.report.train.dropped == {"no_rejected": 20}
    assert "dropped: 20 no_rejected" in built.report.sentence


@pytest.mark.parametrize(
    ("phase", "row", "reason"),
    [
        (1, {"chosen": None}, "no_chosen"),
        (1, {"prompt": None}, "no_prompt"),
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
def test_what_cannot_serve_is_dropped_and_counted(flags, tiny_tokenizer, phase, row, reason):
    split = ["1,0,0", "0,1,0", "0,0,1"][phase - 1]
    data = flags([PAIR, {**PAIR, **row}], data_split=split, eval_fraction=0.0, max_seq_len=60, max_prompt_seq_len=60)
    built = build_phase(phase, data, tiny_tokenizer, seed=1)
    assert len(built.train) == 1 and built.report.train.dropped == {reason: 1}


LONG = {"prompt": "Human: " + "7 " * 20 + "Assistant:", "chosen": " yes" * 10, "rejected": " no" * 20}


@pytest.mark.parametrize("truncation", ["right", "left", "middle"])
@pytest.mark.parametrize("phase", [1, 2])
def test_truncation_is_counted_and_keeps_within_the_length(flags, tiny_tokenizer, truncation, phase):
    split = ["1,0,0", "0,1,0"][phase - 1]
    data = flags([PAIR, LONG], data_split=split, eval_fraction=0.0, max_seq_len=70, truncation=truncation)
    built = build_phase(phase, data, tiny_tokenizer, seed=1)
    assert built.report.train.truncated == 1 and built.report.train.dropped == {}
    row = built.train[1]
    if phase == 1:
        assert len(row.input_ids) == 70
        text = tiny_tokenizer.decode(row.input_ids)
        assert text.endswith("<|endoftext|>") == (truncation != "right")  # a cut text does not end there
        assert row.loss_mask[-1] and row.loss_mask.any()
    else:
        assert max(len(row.prompt_ids) + len(ids) for ids in row.response_ids) == 70
        assert all(ids[-1] == tiny_tokenizer.eos_token_id for ids in row.response_ids)


def test_long_prompts_can_be_cut(flags, tiny_tokenizer):
    data = flags([PAIR, LONG], data_split="0,0,1", eval_fraction=0.0, max_prompt_seq_len=25)
    built = build_phase(3, with_flags(data, prompt_truncation="left"), tiny_tokenizer, seed=1)
    assert built.report.train.truncated == 1 and max(built.train.lengths) == 25
    assert tiny_tokenizer.decode(built.train[1].flipped_prompt_ids[::-1]).endswith("7 Assistant:")
    assert built.train[1].prompt_text == LONG["prompt"]


def prompts_of(flags, tokenizer, rows, **given):
    return build_phase(3, flags(rows, data_split="0,0,1", eval_fraction=0.0, **given), tokenizer, seed=1)


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_how_long_prompts_are_cut(flags, tiny_tokenizer, truncation):
    text = "9 8 7 6 5 4 3 2 1 0"
    whole = tiny_tokenizer(text)["input_ids"]
    assert len(whole) > 10
    (row,) = prompts_of(
        flags, tiny_tokenizer, [{"prompt": text}], max_prompt_seq_len=7, prompt_truncation=truncation
    ).train
    # verl's cuts: the last 7, the first 7, or the first 7 // 2 and the last 7 - 7 // 2
    kept = {"left": whole[-7:], "right": whole[:7], "middle": whole[:3] + whole[-4:]}[truncation]
    assert row.flipped_prompt_ids[::-1].tolist() == kept


def test_long_prompts_are_filtered_in_parallel_and_counted(flags, tiny_tokenizer):
    rows = [{"prompt": f"{i}" + " 7" * (60 if i % 3 == 0 else 1)} for i in range(2100)]
    built = prompts_of(flags, tiny_tokenizer, rows, max_prompt_seq_len=20, num_workers=2)
    assert built.report.train.dropped == {"prompt_too_long": 700} and len(built.train) == 1400
    assert "1,400 rows" in built.report.sentence and "dropped: 700 prompt_too_long" in built.report.sentence
    assert [row.row_id for row in built.train] == [i for i in range(2100) if i % 3]


def test_truncation_error_names_the_row(flags, tiny_tokenizer):
    data = flags([PAIR, LONG], data_split="1,0,0", eval_fraction=0.0, max_seq_len=70, truncation="error")
    with pytest.raises(ThreestepError, match=r"row id 1: a sentence of \d+ tokens, and max_seq_len is 70"):
        build_phase(1, data, tiny_tokenizer, seed=1)
    data = flags(
        [PAIR, LONG],
        data_split="0,0,1",
        eval_fraction=0.0,
        max_prompt_seq_len=40,
        prompt_truncation="error",
    )
    with pytest.raises(ThreestepError, match=r"row id 1: a prompt of \d+ tokens, and max_prompt_seq_len is 40"):
        build_phase(3, data, tiny_tokenizer, seed=1)


def test_raw_ids_raw_chat_and_full_prompt_on_request(flags, tiny_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "Hi " * 9}]}, {"prompt": "Human: Hi Assistant:"}]
    plain = prompts_of(flags, tiny_tokenizer, rows[:1], max_prompt_seq_len=6, prompt_truncation="left")
    assert plain.train[0].columns.keys() == {"data_source"}
    asked = {"return_columns": ["raw_prompt_ids", "raw_prompt", "full_prompts"]}
    built = prompts_of(flags, tiny_tokenizer, rows[:1], max_prompt_seq_len=6, prompt_truncation="left", **asked)
    assert not built.report.resumed
    (row,) = built.train
    assert row.columns["raw_prompt_ids"] == row.flipped_prompt_ids[::-1].tolist() and row.length_tokens == 6
    assert row.columns["raw_prompt"] == rows[0]["prompt"]
    assert row.columns["full_prompts"] == f"Human: {'Hi ' * 9} Assistant:" == row.prompt_text
    (text,) = prompts_of(flags, tiny_tokenizer, rows[1:], return_columns=["raw_prompt"]).train
    assert text.columns["raw_prompt"] == [{"role": "user", "content": "Hi"}]


def test_rows_for_which_a_class_returns_images_are_refused_by_name(own, tiny_tokenizer):
    for phase in (1, 2, 3):
        data = own(get_images=lambda self, sample: [b"a picture"])
        with pytest.raises(
            ThreestepError, match=r"dataset 'own', row \d+: get_images returned images, and only text is"
        ):
            build_phase(phase, data, tiny_tokenizer, seed=1)
