"""The preview: its JSON against hand-made rows, what it marks and counts, and the mistakes a user can make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.forked_programs import run_python
from threestep.plugins.inspect import preview
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import SPLITS

pytestmark = pytest.mark.unit

PAIR = {"prompt": "Human: 1 + 1? Assistant:", "chosen": " It is 2.", "rejected": " Three"}
SAID = (("user", "Hello"), ("assistant", "Good day"), ("user", "Bye"), ("assistant", "So long"))
CHAT = {"messages": [{"role": role, "content": text} for role, text in SAID]}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(chat_template("chatml"))


@pytest.fixture
def arguments(tmp_path: Path, tokenizer):
    """Flags for hand-made rows: a folder with a tokenizer and no model, all rows in the phase, a cache of its own."""

    def make(rows: list[dict], phase: str, *flags: str) -> list[str]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        weights = {"1": "1,0,0", "2": "0,1,0", "3": "0,0,1"}.get(phase, "1,0,0")
        return [
            f"--phase={phase}", "--data_path", f"jsonl:{file}", f"--tokenizer={tmp_path / 'tokenizer'}",
            f"--data_split={weights}", "--eval_fraction=0", f"--data_output_path={tmp_path / 'cache'}",
            "--prompt_style=human_assistant", *flags,
        ]  # fmt: skip

    return make


@pytest.fixture
def text(arguments, capsys):
    def run(*given: str | list) -> str:
        preview.main(arguments(*given))
        return capsys.readouterr().out

    return run


@pytest.fixture
def objects(text):
    return lambda *given: [json.loads(line) for line in text(*given, "--json").splitlines()]


def test_a_pair_in_phase_1_is_its_prompt_and_its_chosen_response_with_loss_on_the_response(objects, tokenizer):
    (row,) = objects([PAIR], "1")
    prompt = tokenizer(PAIR["prompt"])["input_ids"]
    response = [*tokenizer(PAIR["chosen"])["input_ids"], tokenizer.eos_token_id]
    count = len(prompt) + len(response)
    assert row["input_ids"] == prompt + response
    assert row["loss_mask"] == [0] * len(prompt) + [1] * len(response)
    assert row["position_ids"] == list(range(count)) and row["segment_ids"] == [0] * count
    assert row["visible"] == [[1]] and row["sequence_ends"] == [count - 1]
    assert row["text"] == PAIR["prompt"] + PAIR["chosen"] + "<|endoftext|>"
    assert row["loss_texts"] == [PAIR["chosen"] + "<|endoftext|>"]
    assert (row["phase"], row["split"], row["place"], row["tokens"]) == ("1", "train", 0, count)


def test_phase_2_is_one_object_a_prompt_in_the_shared_layout(objects, tokenizer):
    (row,) = objects([PAIR], "2")
    prompt = tokenizer(PAIR["prompt"])["input_ids"]
    responses = [[*tokenizer(PAIR[name])["input_ids"], tokenizer.eos_token_id] for name in ("chosen", "rejected")]
    lengths = [len(prompt), *(len(ids) for ids in responses)]
    assert row["input_ids"] == prompt + responses[0] + responses[1]
    assert row["segment_ids"] == [0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2]
    after = [list(range(lengths[0], lengths[0] + length)) for length in lengths[1:]]
    assert row["position_ids"] == [*range(lengths[0]), *after[0], *after[1]]
    assert row["visible"] == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert row["loss_mask"] == [0] * lengths[0] + [1] * (lengths[1] + lengths[2])
    assert row["sequence_ends"] == [lengths[0] + lengths[1] - 1, sum(lengths) - 1]
    assert (row["prompt"], row["margins"]) == (PAIR["prompt"], None)
    assert row["chosen"] == PAIR["chosen"] + "<|endoftext|>" and row["rejected"] == PAIR["rejected"] + "<|endoftext|>"
    assert row["responses"] == [row["chosen"], row["rejected"]]


def test_phase_3_gives_prompts_in_reading_order_whole_text_and_reference(objects, tokenizer):
    rows = [{"prompt": PAIR["prompt"], "reward_model": {"ground_truth": "2"}}]
    (row,) = objects(rows, "3", "--max_prompt_seq_len=4", "--prompt_truncation=left")
    assert row["input_ids"] == tokenizer(PAIR["prompt"])["input_ids"][-4:]
    assert row["loss_mask"] == [0] * 4 and row["loss_texts"] == []
    assert (row["prompt_text"], row["reference"]) == (PAIR["prompt"], "2")
    assert row["columns"]["data_source"].startswith("jsonl:") and len(row["uid"]) == 16


def test_unsupervised_blocks_predict_all_but_their_first_token(objects, tmp_path):
    flags = [f"--unsupervised_dataset_name=jsonl:{tmp_path / 'rows.jsonl'}", "--max_prompt_seq_len=3"]
    rows = objects([{"text": "Some words to read."}], "unsupervised", *flags, "--max_answer_seq_len=2")
    assert [row["loss_mask"] for row in rows[:2]] == [[0, 1, 1, 1, 1]] * 2
    assert "".join(row["text"] for row in rows).startswith("Some words")


def test_index_is_the_rows_place_in_its_file_also_where_rows_before_it_are_dropped(objects):
    rows = [{**PAIR, "chosen": " "}, PAIR, {**PAIR, "chosen": " Two."}]
    found = objects(rows, "1")
    assert [(row["index"], row["place"]) for row in found] == [(1, 0), (2, 1)]
    assert {row["source_part"] for row in found} == {"training"}
    assert found[0]["source"].endswith("rows.jsonl")


def test_rows_and_first_choose_and_0_is_all(objects):
    rows = [{**PAIR, "chosen": f" {number}"} for number in range(7)]
    assert [row["place"] for row in objects(rows, "1")] == [0, 1, 2, 3, 4]
    assert [row["place"] for row in objects(rows, "1", "--rows=0")] == list(range(7))
    assert [row["place"] for row in objects(rows, "1", "--first=5", "--rows=9")] == [5, 6]


def test_evaluation_rows_are_shown_on_request(objects):
    rows = [{**PAIR, "chosen": f" {number}"} for number in range(8)]
    flags = ("1", "--eval_fraction=0.25", "--rows=0")
    shown = {split: objects(rows, *flags, f"--split={split}") for split in SPLITS}
    indices = {split: {row["index"] for row in found} for split, found in shown.items()}
    assert len(indices["eval"]) == 2 and indices["eval"] | indices["train"] == set(range(8))


def test_text_marks_loss_by_brackets_where_no_terminal_is_and_counts(text):
    said = text([PAIR, {**PAIR, "chosen": " "}], "1", "--show_layout")
    assert "Human: 1 + 1? Assistant:⟦ It is 2.<|endoftext|>⟧" in said and "\033" not in said
    assert "training row 0): " in said and "to predict" in said
    assert "segment 0: tokens 0-" in said and "sees segments: none" in said
    assert "1 of 1 rows of the train split shown" in said
    assert "train: 1 row, " in said and "dropped: 1 empty_response" in said
    assert said.splitlines()[-1].endswith(f" tokens | {'#' * 40} 1")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--phase=4", "--phase expects one of 1, 2, 3, unsupervised, got '4'"),
        ("--split=test", "--split expects one of train, eval, got 'test'"),
        ("--rows=-1", "--rows expects 0 or more, got -1"),
        ("--first=-1", "--first expects 0 or more, got -1"),
        ("--first=9", "--first must be less than 1, the number of rows in the train split, got 9; lower it"),
        ("--max_answer_seq_len=0", "--max_answer_seq_len expects 1 or more, got 0"),
        ("--tokenizer=", "--tokenizer expects a folder or hub name, got nothing"),
        ("--tokenizer=./nowhere", "the model folder './nowhere' does not exist"),
        ("--phase=unsupervised --split=eval", "unsupervised text has only training rows; remove --split"),
    ],
)
def test_mistakes_are_said(arguments, flag, message):
    with pytest.raises(ThreestepError) as mistake:
        preview.main([*arguments([PAIR], "1"), *flag.split()])
    assert message in str(mistake.value)


def test_standard_output_of_the_program_holds_json_alone_also_where_a_dataset_prints(arguments, tmp_path):
    module = tmp_path / "chatty.py"
    module.write_text("print('I am loaded')\n", encoding="utf-8")
    flags = arguments([PAIR, CHAT["messages"][0] | PAIR], "1", "--json", "--dataset_module", str(module))
    ran = run_python(["-m", "threestep.plugins.inspect.preview", *flags])
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["index"] for line in ran.stdout.splitlines()] == [0, 1]
    assert "I am loaded" in ran.stderr and "train: 2 rows" in ran.stderr


def test_a_page_has_the_rows_with_their_masks(arguments, tmp_path, capsys):
    evil = {**CHAT["messages"][1], "content": "<script>x</script>"}
    rows = [CHAT, {"messages": [CHAT["messages"][0], evil]}]
    file = tmp_path / "rows.html"
    preview.main([*arguments(rows, "1"), f"--html={file}"])
    page = file.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""
    assert page.count('class="card sample"') == 2 and "<mark> &lt;script&gt;x&lt;/script&gt;" in page
    assert "<mark> So long" in page and "<mark>Hello" not in page and "<script" not in page
    with pytest.raises(ThreestepError, match="^--html expects a file, got '.*', which is a folder; choose another$"):
        preview.main([*arguments(rows, "1"), f"--html={tmp_path}"])
    with pytest.raises(ThreestepError, match="--html .* writes only text and masks; remove --json"):
        preview.main([*arguments(rows, "1"), f"--html={file}", "--json"])
