"""Data that do not fit are refused before anything is loaded; large, remote and made ones are left to the build."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.data_flags import data_flags
from training.utils.base.errors import ThreestepError
from training.utils.data import file_dataset
from training.utils.data.file_dataset import POINTER, look_at_data
from training.utils.data.registry import find_dataset


def look(name: str, phase: int = 1, **flags) -> None:
    look_at_data(phase, data_flags(data_path=[name], **flags).source)


def test_a_file_that_cannot_serve(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    look(str(path))
    with pytest.raises(ThreestepError, match=f"no column 'Question'; .*did you mean 'question'.*{POINTER}$"):
        look(str(path), prompt_column="Question", chosen_column="answer")
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ThreestepError, match="phase 2 needs prompts and this is plain text"):
        look(str(path), phase=2)


@pytest.mark.needs_plugin("embedded")
def test_data_for_the_first_step_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    flags = data_flags(data_path=["embedded"], sft_only_data_path=[str(tmp_path / "rows.jsonl")]).source
    look_at_data(1, flags)
    look_at_data(2, flags)
    (tmp_path / "rows.jsonl").write_text("{")
    look_at_data(2, flags)
    with pytest.raises(ThreestepError, match="line 1: expected one JSON object"):
        look_at_data(1, flags)


def test_large_files_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{")
    monkeypatch.setattr(file_dataset, "_MOST_BYTES", 0)
    look(str(tmp_path / "rows.jsonl"))


@pytest.mark.needs_plugin("embedded")
def test_the_hub_is_asked_for_its_datasets_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(file_dataset, "check_hub", lambda *words: asked.append(words))
    look("embedded")
    monkeypatch.setattr(find_dataset("embedded"), "is_on_hub", True)
    look("embedded")
    assert [words[1:] for words in asked] == [("datasets", "embedded")]


def test_it_loads_no_torch():
    code = "import sys, training.utils.setup.step_program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
