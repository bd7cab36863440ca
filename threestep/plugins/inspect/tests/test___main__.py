"""The program: its three forms, and how it ends where data are refused or nobody reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import training
from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.image_readers import picture, write_folder
from tests.unit.threestep.test_command import unread
from threestep.plugins.inspect import __main__ as program
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


PAIR = {"question": "Is 1 a number?", "answer": "Yes.", "rejected": "No.", "topic": "sums"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]}


@pytest.fixture
def run(tmp_path, write_rows, capsys):
    """What the program prints for rows and flags."""

    def inspect(rows: list[dict], *flags: str) -> str:
        cache = f"--data_output_path={tmp_path / 'cache'}"
        program.main(["--data_path", write_rows(rows), "--eval_fraction=0", cache, *flags])
        return capsys.readouterr().out

    return inspect


def test_text_says_what_was_read_and_marks_what_carries_loss(run):
    said = run([PAIR] * 10, "--rows=1", "--data_split=3,3,4")
    assert "Human: Is 1 a number? Assistant:⟦ Yes.<end>⟧" in said
    assert "read as question_answer because of its columns; not read: 'topic'" in said
    phase_1 = "step 1 (supervised fine-tuning): 3 of 10 training rows (--data_split 3,3,4); --data_split 1,0,0 uses"
    assert phase_1 in said
    assert "step 3 (PPO): 4 of 10 training rows (--data_split 3,3,4); --data_split 0,0,1 uses all; 0 held out" in said
    assert "no --model_name_or_path" in said and "lengths in characters, before any cut: least 38, median 38" in said


def test_json_has_the_ids_of_the_model_and_the_runs_of_each_row(run, tmp_path):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--json", "--phase=1", "--data_split=1,0,0"]
    found = json.loads(run([CHAT], *flags, f"--model_name_or_path={tmp_path / 'model'}"))
    (phase,) = found["phases"]
    (row,) = phase["rows"]
    assert (found["unit"], found["refused"]) == ("tokens", None)
    assert found["style"].startswith("prompt style: chat_template, responses end with <|im_end|>")
    kept = [token for token, carries_loss in zip(row["input_ids"], row["loss_mask"], strict=True) if carries_loss]
    ((_, runs),) = row["texts"]
    assert tokenizer.decode(kept) == "Good day<|im_end|>" and ["Good day<|im_end|>", True] in runs
    assert found["sources"][0]["recognised"]["format"] == "messages"
    assert phase["lengths"]["most"] == len(row["input_ids"])


@pytest.mark.parametrize(
    ("row", "style"),
    [({"prompt": "1 + 1 =", "completion": " 2"}, "as_stored"), (PAIR, "human_assistant")],
)
def test_the_style_is_the_one_that_training_saves(run, tmp_path, tiny_tokenizer, row, style):
    """The sentence of a run's log on the same rows, by the function that training calls."""
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    model = f"--model_name_or_path={tmp_path / 'model'}"
    form = "use prompts as stored" if style == "as_stored" else "use 'Human: ... Assistant:'"
    said = " ".join(run([row] * 5, model).split())
    why = f"(the tokenizer has no chat template, and the rows {form})"
    assert f"prompt style: {style}, responses end with <|endoftext|> {why}" in said
    other = "human_assistant" if style == "as_stored" else "as_stored"
    said = " ".join(run([row] * 5, model, "--prompt_style", other).split())
    assert f"--prompt_style {style} matches the rows" in said
    assert f"prompt style: {other}, responses end with <|endoftext|> (--prompt_style)" in said


def test_a_page_is_written(run, tmp_path):
    assert run([PAIR] * 5, f"--html={tmp_path / 'data.html'}") == ""
    assert "<mark> Yes.&lt;end&gt;</mark>" in (tmp_path / "data.html").read_text(encoding="utf-8")
    assert run([PAIR] * 5, f"--html={tmp_path / 'new' / 'data.html'}") == "" and (tmp_path / "new/data.html").is_file()
    with pytest.raises(ThreestepError, match="^--html expects a file, got '.*new', which is a folder; choose another$"):
        run([PAIR] * 5, f"--html={tmp_path / 'new'}")


OWN = """
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset

@register_dataset("acme/unread")
class Unread(PromptRawDataset):
    def load_raw_datasets(self, dataset_name):
        return None

    def get_train_data(self):
        return self.rows
"""


def test_a_class_whose_rows_cannot_be_read_is_named(tmp_path):
    (tmp_path / "unread.py").write_text(OWN)
    with pytest.raises(ThreestepError, match="Unread.get_train_data raised AttributeError: .* .unread.py, line 11.$"):
        program.main(["--dataset_module", str(tmp_path / "unread.py"), "--data_path", "acme/unread"])


def test_refused_data_are_shown_and_end_it_as_they_would_end_a_run(run, capsys):
    with pytest.raises(ThreestepError, match="fit no format") as refusal:
        run([{"frage": "Was?"}])
    said = capsys.readouterr().out
    assert "frage   text" in said and "Was?" in said and "threestep.plugins.inspect" not in str(refusal.value)
    assert "refused: step 2 needs" not in run([PAIR] * 5)  # one phase that cannot be served is no failure
    assert "step 2 needs responses" in run([{"prompt": "Why?"}] * 5)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--prompt_style=chat_template", "--prompt_style chat_template needs --model_name_or_path; pass a"),
        ("--chat_template_kwargs={}", "--chat_template_kwargs needs --model_name_or_path"),
        ("--parallel_thinking", "--parallel_thinking needs --model_name_or_path"),
        ("--phase=4", "--phase expects one of all, 1, 2, 3, got '4'"),
        ("--look_at=0", "--look_at expects 1 or more, got 0"),
        ("--model_name_or_path=./nowhere", "the model folder './nowhere' does not exist"),
    ],
)
def test_mistakes_are_said(run, flag, message):
    with pytest.raises(ThreestepError) as mistake:
        run([PAIR], flag)
    assert message in str(mistake.value)


def test_a_program_run_by_its_path_finds_the_standard_librarys_inspect():
    """Its folder is then the first place of modules, and holds one of that name."""
    package = Path(training.__path__[0])
    asked = "import sys; sys.path.insert(0, sys.argv[1]); import inspect; print(inspect.signature(len), inspect)"
    command = [sys.executable, "-S", "-c", asked, str(package)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert ran.stdout.startswith("(obj, /) ") and str(package) not in ran.stdout


def test_images_are_shown_in_words_and_on_the_page_as_small_pictures(run, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(600, 28))
    rows = [{"messages": [{"role": "user", "content": "<image>What?"}, CHAT["messages"][1]], "images": ["a.png"]}] * 2
    flags = ["--phase=1", "--data_split=1,0,0", "--rows=1", f"--model_name_or_path={write_folder(tmp_path / 'model')}"]
    said = run(rows, *flags, f"--html={tmp_path / 'page.html'}", "--json")
    assert "<img src=" in (tmp_path / "page.html").read_text()
    (row,) = json.loads(said)["phases"][0]["rows"]
    (words,) = row["images"]
    assert words.startswith("600 x 28 pixels (PNG, ") and words.endswith(" 18 tokens of 1 x 18 from token 7")
    assert "<|image_pad|> x 18<|vision_end|>" in "".join(text for text, _ in row["texts"][0][1])
    lines = run(rows, *flags).splitlines()
    assert any(line.startswith("image 1: 600 x 28 pixels") for line in lines)
    assert any(line.split()[:4] == ["images", "a", "list", "images"] for line in lines)


def test_rows_do(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 20)
    code, printed = unread("inspect", "--data_path", f"jsonl:{tmp_path / 'rows.jsonl'}")
    assert code == 141 and "Traceback" not in printed and "BrokenPipe" not in printed
