"""What could not be saved at the end of a run, or would be loaded as something else, is refused before its start; a
trained model is written to its folder, or where a part of the course writes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.contracts.run import RunCourse
from training.utils.engine.ranks.startup import Ranks
from training.utils.setup.saving import FinalModels, check_saving

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


class Elsewhere(RunCourse):
    def write_refused(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path:
        save(place.parents[1] / "elsewhere")
        return place.parents[1] / "elsewhere"


def saved_in(place: Path) -> None:
    place.mkdir()


def test_in_its_folder(tmp_path):
    final = FinalModels(tmp_path, [Elsewhere()], ALONE)
    final.write("model", saved_in)
    final.check()
    assert (tmp_path / "model").is_dir()


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(ThreestepError, match="run/model"):
        FinalModels(tmp_path / "run", [RunCourse()], ALONE).write("model", saved_in)
    final = FinalModels(tmp_path / "run", [RunCourse(), Elsewhere()], ALONE)
    final.write("model", saved_in)
    assert (tmp_path / "elsewhere").is_dir()
    with pytest.raises(ThreestepError, match="training is complete, .* then mv .*/elsewhere .*/run/model$"):
        final.check()


@pytest.fixture
def tokenizer(tiny_tokenizer) -> Any:
    return copy.deepcopy(tiny_tokenizer)


def model_for(tokenizer: Any, scalar: bool = False) -> Any:
    model = (tiny_scalar_model if scalar else tiny_causal_lm)("llama", vocab_size=len(tokenizer))
    model.name_or_path = "START"
    return model


def check(folder: Path, model: Any, tokenizer: Any, processor: Sequence[Path] = ()) -> None:
    engine: Any = SimpleNamespace(module=SimpleNamespace(model=model))
    check_saving(folder, CheckpointParts({"model": engine}, ALONE, (), {"model": tokenizer}, processor), False)


@pytest.mark.parametrize("scalar", [False, True])
def test_what_can_be_saved_leaves_nothing(tmp_path, tokenizer, scalar, capsys):
    tokenizer.chat_template = "{{ messages }}"
    check(tmp_path, model_for(tokenizer, scalar), tokenizer)
    assert "START" not in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_what_is_mended_is_said(tmp_path, tokenizer, capsys):
    model = model_for(tokenizer)
    model.generation_config.temperature = 0.9
    check(tmp_path, model, tokenizer)
    said = capsys.readouterr().out
    assert "warning: 'START': its generation settings have temperature 0.9, which transformers ignores" in said
    assert model.generation_config.temperature is None


def test_no_weights_are_written(tmp_path, tokenizer, monkeypatch):
    written: set[str] = set()

    def note_files(files: Any, folder: Path) -> None:
        written.update(path.name for path in folder.iterdir())

    monkeypatch.setattr("training.utils.setup.saving.copy_files", note_files)
    check(tmp_path, model_for(tokenizer), tokenizer)
    assert written == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_settings_that_cannot_be_written_and_a_processor_that_is_gone(tmp_path, tokenizer):
    model, words = model_for(tokenizer), "'START': a model trained from it could not be saved and loaded again ."
    with pytest.raises(ThreestepError, match=f"{words}FileNotFoundError: .*gone.json"):
        check(tmp_path, model, tokenizer, [tmp_path / "gone.json"])
    model.config.odd = object()
    with pytest.raises(ThreestepError, match=f"{words}TypeError: "):
        check(tmp_path, model, tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.add_tokens(["<more>"]), r"its tokenizer has \d+ tokens, not \d+, or other ids for some"),
        (lambda one: setattr(one, "eos_token", "a"), r"its tokenizer has the eos_token_id \d+, not \d+"),
        (lambda one: setattr(one, "pad_token", "a"), r"its tokenizer has the pad_token_id \d+, not \d+"),
        (lambda one: setattr(one, "chat_template", "x"), "its tokenizer has a different chat template"),
        (lambda one: one.backend_tokenizer.model.__setattr__("dropout", 1.0), "splits a text into different tokens"),
    ],
)
def test_a_tokenizer_that_is_loaded_as_another(tmp_path, tokenizer, monkeypatch, change, words):
    """What is written is not what is trained with."""
    write = PreTrainedTokenizerBase.save_pretrained

    def write_another(self: Any, folder: Any, **options: Any) -> Any:
        other = copy.deepcopy(self)
        change(other)
        return write(other, folder, **options)

    monkeypatch.setattr(type(tokenizer), "save_pretrained", write_another)
    with pytest.raises(ThreestepError, match=f"would change when it is loaded: .*{words}; save its folder again"):
        check(tmp_path, model_for(tokenizer), tokenizer)


def test_a_configuration_that_is_read_as_another(tmp_path, tokenizer, monkeypatch):
    def mistral(files: Any, folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(file.read_text().replace('"llama"', '"mistral"'))

    monkeypatch.setattr("training.utils.setup.saving.copy_files", mistral)
    with pytest.raises(ThreestepError, match="its config.json is read as a MistralConfig, not a LlamaConfig"):
        check(tmp_path, model_for(tokenizer), tokenizer)
