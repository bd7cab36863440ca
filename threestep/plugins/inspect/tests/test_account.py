"""The account of data: its figures are those of a build with the same flags, and its marks are on the trained text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import training.utils.data
from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import data_flags
from threestep.plugins.inspect.account import REASONS
from threestep.plugins.inspect.characters import END
from training.utils.data.build.build import build_phase

pytestmark = pytest.mark.unit

QUESTIONS = [
    {"question": f"What is {i}" + " now" * (i % 5) + "?", "answer": f"It is {i}." + " Yes." * (i % 9)}
    | {"rejected": f"No {i}.", "topic": "sums"}
    for i in range(60)
]
QUESTIONS[7]["answer"] = QUESTIONS[7]["rejected"]
QUESTIONS[8]["answer"] = " "
QUESTIONS[9]["rejected"] = None
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day"},
    {"role": "user", "content": "Code?"},
    {"role": "assistant", "content": "    return x"},
]


def loss_texts(phase) -> list[str]:
    return [text for row in phase.rows for _, runs in row.texts for text, carries_loss in runs if carries_loss]


def whole_texts(phase) -> list[str]:
    return ["".join(text for _, runs in row.texts for text, _ in runs) for row in phase.rows]


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_its_figures_are_those_of_a_build(look, write_rows, tmp_path, tiny_tokenizer, phase):
    given = {"prompt_style": "human_assistant", "max_seq_len": 36, "max_prompt_seq_len": 18, "data_split": "3,3,2"}
    given |= {"data_path": [write_rows(QUESTIONS)], "data_output_path": str(tmp_path / "built")}
    built = build_phase(phase, data_flags(**given), tiny_tokenizer, seed=1)
    (found,) = look(None, [phase], tiny_tokenizer, **given).phases
    report = built.report.train
    assert (found.kept, found.tokens, found.cut, found.dropped) == (
        report.rows, report.tokens, report.truncated, report.dropped,
    )  # fmt: skip
    assert found.looked_at == found.share_rows == report.rows + sum(report.dropped.values())
    assert found.eval_rows == built.report.eval.rows + sum(built.report.eval.dropped.values())
    assert found.all_rows == len(QUESTIONS) - found.eval_rows
    assert found.cut or found.dropped, "the limits cut or drop some row"
    shown = [row.input_ids for row in found.rows]
    ids = {tuple(row.flipped_prompt_ids[::-1] if phase == 3 else ()) for row in built.train}
    if phase == 3:
        assert {tuple(own) for own in shown} <= ids and not any(any(row.loss_mask) for row in found.rows)
    if phase == 1:
        by_ids = {tuple(row.input_ids): row.loss_mask.tolist() for row in built.train}
        assert all(by_ids[tuple(row.input_ids)] == list(map(bool, row.loss_mask)) for row in found.rows)


def test_the_text_that_carries_loss_is_the_answer_and_its_end(look):
    rows = [QUESTIONS[3], QUESTIONS[5]]
    sft, pairs, prompts = look(rows, data_split="1,0,0", eval_fraction=0.0).phases
    assert loss_texts(sft) == [f" {row['answer']}{END}" for row in rows]
    assert whole_texts(sft) == [f"Human: {row['question']} Assistant: {row['answer']}{END}" for row in rows]
    assert sft.targets == sum(map(len, loss_texts(sft))) - 2 * (len(END) - 1)  # the end is one token
    (pairs,) = look(rows, [2], data_split="0,1,0", eval_fraction=0.0).phases
    first = dict(pairs.rows[0].texts)
    assert first["prompt"] == [(f"Human: {rows[0]['question']} Assistant:", False)]
    assert first["chosen"] == [(f" {rows[0]['answer']}{END}", True)] and first["rejected"] == [(f" No 3.{END}", True)]
    (prompts,) = look(rows, [3], data_split="0,0,1", eval_fraction=0.0).phases
    assert loss_texts(prompts) == [] and prompts.targets == 0 and prompts.rows[0].others["topic"] == "sums"


def test_under_a_template_every_turn_is_marked_and_the_rest_is_not(look):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    given = {"prompt_style": "chat_template", "data_split": "1,0,0", "eval_fraction": 0.0, "max_seq_len": 999}
    (phase,) = look([{"messages": CHAT}], [1], tokenizer, **given).phases
    assert loss_texts(phase) == ["Good day<|im_end|>", "    return x<|im_end|>"]
    (phase,) = look([{"messages": CHAT}], [1], tokenizer, train_turns="last", **given).phases
    assert loss_texts(phase) == ["    return x<|im_end|>"] and "last response" in phase.loss
    assert phase.counted == {"responses end with <|im_end|>": 1}


def test_reasoning_that_the_template_leaves_out_is_counted(look):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    rows = [{"messages": [*CHAT[:2], {**CHAT[2], "thinking": "a greeting"}]}, {"messages": CHAT}]
    (phase,) = look(rows, [1], tokenizer, eval_fraction=0.0, data_split="1,0,0").phases
    assert phase.counted["rows: trained without the reasoning in their answer, which the chat template omits"] == 1
    assert "unread_reasoning" in REASONS


def test_a_refused_source_still_shows_its_columns(look, write_rows):
    good = write_rows(QUESTIONS, "good.jsonl")
    bad = write_rows([{"frage": "Was?", "antwort": "Das.", "n": 1}], "bad.jsonl")
    account = look(None, data_path=[good, bad])
    assert account.phases == [] and account.refused is not None and "fit no format" in account.refused
    first, second = account.sources
    assert first.refused is None and second.refused == account.refused
    columns = [(each.name, each.example) for each in second.columns]
    assert columns == [("frage", "Was?"), ("antwort", "Das."), ("n", "1")]


def test_a_refused_phase_is_told_and_refuses_all_only_where_every_phase_is(look):
    rows = [{"text": "Plain text."}] * 10
    account = look(rows)
    assert [phase.refused is None for phase in account.phases] == [True, False, False] and account.refused is None
    assert "step 2 needs prompts, but this is plain text" in str(look(rows, [2]).refused)
    nothing = look(QUESTIONS, [2], data_split="1,0,0")
    assert nothing.refused == "step 2 gets no rows: --data_split 1,0,0 assigns it none"
    unpaired = look([{**row, "rejected": None} for row in QUESTIONS], [2])
    assert str(unpaired.refused).startswith("step 2 has no training rows: all are dropped (")


def test_dropped_rows_are_named_with_their_reason(look):
    (phase,) = look(QUESTIONS, [2], data_split="0,1,0", eval_fraction=0.0).phases
    named = {(int(row.where.rpartition(" ")[2]) - 1, row.reason) for row in phase.dropped_rows}
    assert named == {(7, "identical_responses"), (8, "empty_response"), (9, "no_rejected")}
    assert phase.dropped == {"identical_responses": 1, "empty_response": 1, "no_rejected": 1} and phase.kept == 57


def test_of_many_rows_a_sample_is_looked_at_and_rows_are_spread_over_all_sources(look, write_rows):
    paths = [write_rows(QUESTIONS, name) for name in ("a.jsonl", "b.jsonl")]
    (phase,) = look(None, [3], data_path=paths, data_split="0,0,1", most_rows=20, shown=4).phases
    assert (phase.share_rows, phase.looked_at, len(phase.rows)) == (108, 20, 4)
    assert {row.source for row in phase.rows} == set(paths) and [share for _, share, _ in phase.shares] == [54, 54]


def test_every_reason_for_which_a_row_is_dropped_has_words():
    code = "\n".join(path.read_text() for path in Path(training.utils.data.__path__[0]).rglob("*.py"))
    found = set(re.findall(r'Dropped\("(\w+)"\)|dropped\["(\w+)"\]', code))
    assert found and {one or other for one, other in found} <= REASONS.keys()


def test_rows_that_would_stop_training_are_counted_and_the_others_are_still_shown(look):
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, CHAT[-1]]
    rows = [{"messages": picture if i in (2, 5) else CHAT} for i in range(8)]
    account = look(rows, [1], data_split="1,0,0", eval_fraction=0.0)
    (phase,) = account.phases
    assert phase.refused is not None and "'image_url'" in phase.refused and account.refused == phase.refused
    assert (phase.stopping, phase.kept, phase.looked_at, len(phase.rows)) == (2, 6, 8, 6)
    assert [row.where.rpartition(" ")[2] for row in phase.stopping_rows] == ["3", "6"]
    assert phase.stopping_rows[0].reason.startswith("message 1: a content part has the type 'image_url'")
    shared = look([{"messages": picture}], data_split="2,4,4")
    nothing, stopped, _ = shared.phases
    assert nothing.share_rows == 0 and shared.refused == stopped.refused


def test_images_that_are_not_read_are_refused_for_the_reason_of_the_model(look):
    rows = [{"prompt": "What?", "chosen": " Red.", "images": ["a.png"]}]
    unread = "models of the family x cannot be trained on images here"
    account = look(rows, (1,), data_split="1,0,0", eval_fraction=0.0, unread=unread)
    assert f"holds images, but {unread}; leave such rows" in str(account)
