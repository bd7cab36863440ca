"""What a configuration says, and which files decide what a model computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification, Gemma3Config, LlamaConfig

from tests.support.tiny_models import FAMILIES, tiny_causal_lm, tiny_config, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import (
    ScoreScale,
    check_positions,
    check_trains,
    errors_explained,
    load_config,
    model_files,
    read_score_scale,
    set_pad_token,
    set_score_scale,
)
from training.utils.models.settings import ModelSettings


def test_positions_by_the_configuration_alone(tmp_path):
    for family in ("llama", "gpt2"):
        folder = tmp_path / family
        tiny_causal_lm(family).config.save_pretrained(folder)  # no weights
        check_positions(ModelSettings(str(folder)), 128, "--max_seq_len")
        with pytest.raises(
            ThreestepError,
            match=f"sequences may have 129 tokens .--max_seq_len., but the model '{folder}' has only 128 positions",
        ):
            check_positions(ModelSettings(str(folder)), 129, "--max_seq_len")


def test_the_files_of_a_model(tmp_path, monkeypatch):
    """Of a folder, and of a hub name the folder that it was put into."""
    for name in ("model-2.safetensors", "model-1.safetensors", "config.json", "tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("")
    wanted = [str(tmp_path / name) for name in ("config.json", "model-1.safetensors", "model-2.safetensors")]
    assert model_files(str(tmp_path)) == wanted

    def cached_file(name: str, file: str, local_files_only: bool = False, **_: bool) -> str | None:
        assert name == "an/owner-model"
        return str(tmp_path / file) if (file, local_files_only) == ("config.json", True) else None

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    assert model_files("an/owner-model") == wanted


def test_the_pad_token_of_a_model_that_reads_images_too():
    """Gemma 3's configuration has it in its part for text alone, where plain transformers looks."""
    config = Gemma3Config()
    set_pad_token(config, 7)
    assert config.text_config.pad_token_id == config.pad_token_id == 7


def config_with(folder: Path, **entries: object) -> str:
    tiny_causal_lm("llama").config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return str(folder)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"vocab_size": "many"}, "Validation error for field 'vocab_size': TypeError: Field 'vocab_size' expected int"),
        ({"use_return_dict": True}, "AttributeError: property 'use_return_dict' of 'LlamaConfig' object has no setter"),
    ],
)
def test_a_value_that_transformers_does_not_read(tmp_path, entries, words):
    folder = config_with(tmp_path, **entries)
    with pytest.raises(ThreestepError, match=f"no model could be loaded from '{folder}': .*{words}"):
        load_config(folder)
    folder = config_with(tmp_path / "generates")
    Path(folder, "generation_config.json").write_text('{"watermarking_config": 3}')
    with pytest.raises(ThreestepError, match=r"no generation settings \(generation_config.json\) could be loaded"):
        check_trains(ModelSettings(folder), generates=True)
    check_trains(ModelSettings(folder), generates=False)
    with pytest.raises(MemoryError), errors_explained("model", "FOLDER", Exception):
        raise MemoryError  # is no damage of a folder


def test_lengths_at_which_one_sequence_changes_another_are_refused(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 512}
    LlamaConfig(**shape, rope_parameters={**rope, "original_max_position_embeddings": 32}).save_pretrained(tmp_path)
    check_positions(ModelSettings(str(tmp_path)), 32, "--max_seq_len")
    with pytest.raises(
        ThreestepError, match=r"sequences may have 33 tokens .--max_seq_len., but .* \(longrope\) .* to"
    ):
        check_positions(ModelSettings(str(tmp_path)), 33, "--max_seq_len")
    with pytest.raises(ThreestepError, match=r"sequences may have 513 tokens .* the model .* has only 512 positions"):
        check_positions(ModelSettings(str(tmp_path)), 513, "--max_seq_len")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_comes_back_and_plain_transformers_loads_the_model(tmp_path, family):
    model = tiny_scalar_model(family)
    set_score_scale(model.config, ScoreScale(0.1 + 0.2, 1 / 3))
    model.save_pretrained(tmp_path)
    assert read_score_scale(str(tmp_path), "--flag") == ScoreScale(0.1 + 0.2, 1 / 3)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (loaded.config.threestep_score_mean, loaded.config.threestep_score_std) == (0.1 + 0.2, 1 / 3)
    set_score_scale(loaded.config, None)
    set_score_scale(loaded.config, None)  # nothing is there any more
    loaded.save_pretrained(tmp_path)
    assert "threestep" not in json.dumps(AutoConfig.from_pretrained(tmp_path).to_dict())


def test_a_model_without_a_scale_or_whose_scores_do_not_vary(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    words = (
        f"--flag needs threestep_score_mean and .* '{tmp_path}', which lacks them: train it with step 2 .--normaliza"
    )
    with pytest.raises(ThreestepError, match=words):
        read_score_scale(str(tmp_path), "--flag")
    for std in (0.0, -1.0, float("nan")):
        config = tiny_config("llama")
        set_score_scale(config, ScoreScale(1.0, std))
        config.save_pretrained(tmp_path)
        with pytest.raises(ThreestepError, match="has threestep_score_std .*: its scores do not vary and cannot be"):
            read_score_scale(str(tmp_path), "--flag")
