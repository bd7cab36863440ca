"""A fingerprint follows content: what does not change rows does not change it, what does, does."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.data.fingerprint import (
    code_of_class,
    content_of_dataset,
    content_of_rows,
    parts_of_tokenizer,
)
from training.utils.data.raw_dataset import PromptRawDataset


def test_a_tokenizer_by_content(tiny_tokenizer, tmp_path):
    parts = parts_of_tokenizer(tiny_tokenizer)
    tiny_tokenizer.save_pretrained(tmp_path / "moved")
    moved = type(tiny_tokenizer).from_pretrained(tmp_path / "moved")
    assert parts_of_tokenizer(moved) == parts  # another place, the same tokenizer
    other = train_tokenizer([*SENTENCES, "one more sentence, one more sentence"], vocab_size=384)
    assert parts_of_tokenizer(other)["tokenizer"] != parts["tokenizer"]


def test_what_a_call_asked_for_is_not_the_tokenizer(tiny_tokenizer):
    before = parts_of_tokenizer(tiny_tokenizer)
    tiny_tokenizer(["a", "bb"], padding="max_length", truncation=True, max_length=9)
    assert parts_of_tokenizer(tiny_tokenizer) == before


def test_special_tokens_and_chat_template_count():
    one, two = train_tokenizer(SENTENCES), train_tokenizer(SENTENCES)
    two.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert parts_of_tokenizer(one) != parts_of_tokenizer(two)
    three = train_tokenizer(SENTENCES)
    three.pad_token = three.eos_token
    assert parts_of_tokenizer(one)["special tokens"] != parts_of_tokenizer(three)["special tokens"]
    three.chat_template = "{{ messages }}"
    assert parts_of_tokenizer(one)["chat template"] == "none" != parts_of_tokenizer(three)["chat template"]


def test_a_tokenizer_without_a_fast_backend(tmp_path):
    class Slow:
        is_fast = False
        special_tokens_map = {"eos_token": "</s>"}
        words = "a b"

        def save_pretrained(self, folder):
            with open(os.path.join(folder, "vocabulary.txt"), "w") as file:
                file.write(self.words)

    one, two = Slow(), Slow()
    assert parts_of_tokenizer(one) == parts_of_tokenizer(two)
    two.words = "a c"
    assert parts_of_tokenizer(one) != parts_of_tokenizer(two)


def test_rows_of_any_sequence():
    rows = [{"a": "é", "b": 1}, {"a": "\ud800", "b": None}]
    assert content_of_rows(rows, "") == content_of_rows([dict(reversed(row.items())) for row in rows], "")
    assert content_of_rows(rows, "") != content_of_rows(rows[::-1], "")
    assert content_of_rows(rows, "") != content_of_rows(rows[:1], "")
    assert content_of_rows(None, "") == "none"


def arrow(rows):
    import datasets

    return datasets.Dataset.from_list(rows)


def test_arrow_datasets_by_content(tmp_path):
    rows = [{"a": str(i)} for i in range(9)]
    changed = [*rows[:8], {"a": "other"}]
    assert content_of_rows(arrow(rows), "") != content_of_rows(arrow(changed), "")
    import datasets

    for name, content in (("one", rows), ("two", changed)):
        arrow(content).save_to_disk(str(tmp_path / name))
    one, two = (datasets.load_from_disk(str(tmp_path / name)) for name in ("one", "two"))
    again = datasets.load_from_disk(str(tmp_path / "one"))
    assert content_of_rows(one, "") == content_of_rows(again, "") != content_of_rows(two, "")
    assert content_of_rows(one.select(range(5)), "") != content_of_rows(one, "")


class Generated(PromptRawDataset):
    rows = ["a"]
    held_out: list[str] | None = None

    def load_raw_datasets(self, dataset_name):
        return None

    def get_train_data(self):
        return self.rows

    def get_eval_data(self):
        return self.held_out


def test_a_dataset_by_both_its_splits_or_by_its_own_answer(monkeypatch):
    raw = Generated("", 1, 0, "generated")
    before = content_of_dataset(raw, "")
    raw.held_out = ["b"]
    assert content_of_dataset(raw, "") != before
    monkeypatch.setattr(Generated, "get_fingerprint", lambda self: "mine")
    assert content_of_dataset(raw, "") == "mine"


def test_the_code_of_a_class_counts(tmp_path):
    source = (
        "from training.utils.data.raw_dataset import PromptRawDataset as Base\n"
        "from training.utils.data.registry import register_dataset\n"
        "@register_dataset('own')\nclass Own(Base):\n    x = {}\n"
    )
    found = []
    for value in ("1", "1", "2"):
        path = tmp_path / "own.py"
        path.write_text(source.format(value))
        program = (
            "from training.utils.data.registry import load_dataset_module as load;"
            "from training.utils.data.fingerprint import code_of_class;"
            f"print(code_of_class(load({str(path)!r}).Own))"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        found.append(run.stdout)
    assert found[0] == found[1] != found[2]
    assert code_of_class(Generated).startswith("Generated ")
