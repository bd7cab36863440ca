"""Folders and hub names that are adapters: their base is found or named, and their pickles are refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from threestep.plugins.lora.folders import adapter_in
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import load_config, model_files
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.loading.weight_files import find_adapter, model_of


def adapter_at(folder: Path, base: object, weights: bool = True, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"peft_type": "LORA", "base_model_name_or_path": base, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    if weights:
        save_file({"base_model.model.x.lora_A.weight": torch.ones(1, 2)}, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path | str, words: str) -> str:
    with pytest.raises(ThreestepError, match=words) as mistake:
        load_config(str(folder))
    assert "\n" not in str(mistake.value)
    return str(mistake.value)


@pytest.mark.parametrize("written", ["absolute", "model", "../model"])
def test_the_base_is_found_from_here_and_from_the_adapter(save_folder, tmp_path, monkeypatch, written):
    base = save_folder()
    monkeypatch.chdir(tmp_path)
    folder = adapter_at(tmp_path / "adapter", base if written == "absolute" else written)
    check_model_folder(str(folder))
    assert Path(model_of(str(folder))).resolve() == Path(base)
    assert load_config(str(folder)).model_type == "llama"
    files = [str(folder / "adapter_config.json"), str(folder / "adapter_model.safetensors")]
    assert model_files(str(folder)) == [*files, *model_files(model_of(str(folder)))]


def test_the_tokenizer_is_the_adapters_or_else_the_bases(save_folder, tmp_path):
    folder = adapter_at(tmp_path / "adapter", save_folder())
    assert len(load_tokenizer(str(folder))) == len(load_tokenizer(model_of(str(folder))))
    own = load_tokenizer(model_of(str(folder)))
    own.add_tokens(["<new>"])
    own.save_pretrained(folder)
    assert "<new>" in load_tokenizer(str(folder)).get_vocab()


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("/no/where", "is an adapter of the model '/no/where', but there is no such folder in the working"),
        ("../runs/step1/model", "there is no such folder in .* or next to the adapter; set base_model"),
        (None, "is an adapter, but its base model is None; set base_model_name_or_path in .* to the model it"),
        ("", "but its base model is ''"),
        (
            "no/such-model",
            r"no base of the adapter '.*/adapter' \(not a folder .* could be loaded from 'no/such-model': ",
        ),
        ("an/owner@v2", "an adapter of revision 'v2' of 'an/owner', .*download"),
    ],
)
def test_a_base_that_is_not_there(tmp_path, base, words):
    name, _, revision = (base or "").partition("@")
    given = {"revision": revision} if revision else {}
    refused(adapter_at(tmp_path / "adapter", name if given else base, **given), words)
    assert find_adapter("no/such-model") is None


def test_a_base_that_is_no_model(save_folder, tmp_path, monkeypatch):
    folder = adapter_at(tmp_path / "adapter", base := save_folder())
    Path(base, "config.json").unlink()
    words = f"the base model of the adapter '{folder}': the folder '{base}' holds no config.json"
    refused(folder, words)
    cached(monkeypatch, {"an/adapter": folder})
    refused("an/adapter", words.replace(str(folder), "an/adapter"))


def test_a_base_that_is_an_adapter(save_folder, tmp_path, monkeypatch):
    inner = adapter_at(tmp_path / "inner", save_folder())
    outer = adapter_at(tmp_path / "outer", str(inner))
    refused(outer, "is an adapter of '.*inner', which is an adapter too; first merge")
    cached(monkeypatch, {"an/adapter": inner})
    third = adapter_at(tmp_path / "third", "an/adapter")
    refused(third, "an adapter of 'an/adapter', which is itself an adapter; merge")


def cached(monkeypatch, folders: dict[str, Path]) -> None:
    """Hub names whose files are on this machine."""

    def cached_file(name: str, file: str, **_: object) -> str | None:
        path = folders[name] / file
        return str(path) if path.is_file() else None

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)


def test_a_hub_name_may_be_an_adapter(save_folder, tmp_path, monkeypatch):
    folder = adapter_at(tmp_path / "cache", base := save_folder())
    cached(monkeypatch, {"an/adapter": folder})
    found = find_adapter("an/adapter")
    assert found is not None and (found.name, found.folder, found.base) == ("an/adapter", folder, base)
    assert load_config("an/adapter").model_type == "llama"


def test_the_command_for_pickled_adapters(save_folder, tmp_path):
    folder = adapter_at(tmp_path / "adapter", save_folder(), weights=False)
    refused(folder, "has PEFT's adapter_config.json but no adapter_model.safetensors; save or download the adapter")
    name, tensor = "base_model.model.x.lora_A.weight", torch.arange(6.0).view(2, 3).t()
    torch.save({name: tensor}, folder / "adapter_model.bin")
    said = refused(folder, r"pickled adapter weights \(adapter_model.bin\), .* if you trust them, convert them: python")
    command = shlex.split(said[said.index("python -c ") :])
    exec(command[2], {})
    assert torch.equal(load_file(folder / "adapter_model.safetensors")[name], tensor)
    check_model_folder(str(folder))


def test_folders_that_hold_adapters_and_are_none(tmp_path):
    adapter_at(tmp_path / "run" / "default", "a/base")
    (tmp_path / "run" / "README.md").write_text("")
    said = f"holds no config.json, so it is not a model folder; did you mean '{tmp_path}/run/def"
    refused(tmp_path / "run", re.escape(said))
    checkpoint = adapter_at(tmp_path / "models" / "actor", "a/base", weights=False)
    (checkpoint / "weights.json").write_text("{}")
    assert adapter_in(checkpoint) is None


def test_files_that_are_damaged(save_folder, tmp_path):
    folder = adapter_at(tmp_path / "adapter", save_folder())
    (folder / "adapter_model.safetensors").write_bytes(b"\x10")
    refused(folder, "adapter_model.safetensors': expected at least 8 bytes .* the file is truncated")
    (folder / "adapter_config.json").write_text("{")
    refused(folder, r"adapter_config.json' is not a JSON object \(.*\); download or copy the adapter again")
