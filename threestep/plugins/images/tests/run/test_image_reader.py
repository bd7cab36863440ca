"""A row with images that nothing reads ends in a sentence that names the model's family and what to do."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, Mistral3Config

from tests.support.data_flags import data_flags
from tests.support.image_readers import tokenizer_of, write_folder
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.setup.media import reader_of_folder, reader_of_model, why_unread


def test_why_the_images_of_rows_are_not_read(tmp_path):
    Mistral3Config().save_pretrained(tmp_path / "unknown")
    LlamaConfig().save_pretrained(tmp_path / "text")
    bare = write_folder(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    assert why_unread(str(tmp_path / "text")) == ONLY_TEXT == why_unread(str(tmp_path))
    unknown = why_unread(str(tmp_path / "unknown"))
    assert unknown.startswith(
        "those of models of the family mistral3 are not read here, only those of gemma3, idefics3,"
    )
    assert unknown.endswith("smolvlm; train a model of one of these, or on texts alone")
    assert why_unread(str(bare)).startswith(f"'{bare}' (qwen2_vl) has no settings of an image processor; copy preproce")
    assert reader_of_model(str(tmp_path / "unknown"), False, tokenizer_of("qwen2_vl")) is None


@pytest.mark.parametrize("form", ["column", "part", "video"])
def test_a_row_says_it(form, tmp_path):
    Mistral3Config().save_pretrained(tmp_path / "unknown")
    answer = {"role": "assistant", "content": "Red."}
    turns = [{"role": "user", "content": "Which?"}, answer]
    row = {"messages": turns, "images": ["a.png"]}
    if form == "part":
        row = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}, answer]}
    if form == "video":
        row = {"messages": turns, "videos": ["a.mp4"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = {"prompt_style": "chat_template", "data_split": "1,0,0", "eval_fraction": 0.0}
    data = data_flags(data_path=[f"jsonl:{tmp_path / 'rows.jsonl'}"], data_output_path=str(tmp_path / "cache"), **asked)
    unread = "those of models of the family mistral3 are not read here, only those of gemma3"
    said = ONLY_TEXT if form == "video" else unread
    with pytest.raises(ThreestepError, match=f"line 1.*, and {said}"):
        build_phase(1, data, tokenizer_of("qwen2_vl"), seed=1, unread=why_unread(str(tmp_path / "unknown")))


def test_a_folder_in_place_of_a_configuration_is_no_tokenizer_alone(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert reader_of_folder(str(tmp_path), None) is None
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ThreestepError, match="holds no config.json"):
        reader_of_folder(str(tmp_path), None)
