"""Damaged safetensors are found by their headers, and named."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from training.utils.base.errors import ThreestepError
from training.utils.loading import weight_files as module
from training.utils.loading.configurations import load_config
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.loading.weight_files import (
    StoredForm,
    WholeWeights,
    check_form,
    find_adapter,
    model_of,
    read_header,
    stored_form,
    weight_files,
)

TENSORS = {
    "b": torch.ones(3, 2, dtype=torch.bfloat16),
    "a": torch.arange(4),
    "none": torch.zeros(0, 5),
    "scalar": torch.tensor(1.0),
    "flag": torch.tensor([True]),
    "small": torch.zeros(7, dtype=torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model.safetensors"


def with_header(file: Path, header: object, data: bytes | None = None) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + (content[8 + length :] if data is None else data))


def header_of(file: Path) -> dict:
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_a_header_says_names_shapes_and_types(file):
    found = read_header(file)
    for stored in (TENSORS, load_file(file)):  # as safetensors reads it too
        assert {name: each.shape for name, each in found.items()} == {
            n: tuple(each.shape) for n, each in stored.items()
        }
    assert (found["b"].dtype, found["a"].dtype, found["b"].file) == ("BF16", "I64", file)
    check_model_folder(str(file.parent))


@pytest.mark.parametrize("kept", [0, 5, 8, 20, -1, -40])
def test_a_file_that_is_cut_off(file, kept):
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    words = rf"model.safetensors': expected at least [\d,]+ bytes .* header, got {len(whole[:kept]):,}: .*truncated"
    with pytest.raises(ThreestepError, match=words):
        check_model_folder(str(file.parent))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: whole + b"more", " is damaged: 4 bytes follow its last tensor; download"),
        (lambda _: LFS, ": .* a Git LFS pointer"),
        (lambda _: b"PK\x03\x04 a zip file, as torch.save writes it", " is damaged: its header claims a"),
        (b"not JSON", " is damaged"),
        (b"[" * 100_000, " is damaged"),
        (b"\xff\xfe", " is damaged"),
        ([], " is damaged"),
        ({"a": None}, " is damaged"),
        ({"a": {"dtype": "F32", "shape": [2]}}, " is damaged"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, " is damaged"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, " is damaged"),
        # safetensors does not open such a file
        ({"__metadata__": {"format": 3}}, " is damaged: the __metadata__ in its header has values that are not"),
        ({"__metadata__": {"format": None}}, " is damaged: the __metadata__ in its header has values that are not"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:30],
)
def test_something_else_by_that_name(file, content, words):
    """content: of the file, or of its header"""
    if callable(content):
        file.write_bytes(content(file.read_bytes()))
    else:
        with_header(file, content, data=b"" if "__metadata__" in str(content) else None)
    with pytest.raises(ThreestepError, match=f"model.safetensors'{words}"):
        check_model_folder(str(file.parent))


@pytest.mark.parametrize("change", ["moved", "longer", "overlaps"])
def test_tensors_that_are_not_where_the_header_says(file, change):
    header = header_of(file)
    entry = header["b"]
    begin, end = entry["data_offsets"]
    changed = {"moved": [begin + 1, end + 1], "longer": [begin, end + 2], "overlaps": [0, end - begin]}
    entry["data_offsets"] = changed[change]
    with_header(file, header)
    with pytest.raises(
        ThreestepError, match=r"model.safetensors' is damaged: its header places \w+ \(\w+ \[[\d, ]*\]\) at"
    ):
        check_model_folder(str(file.parent))


def test_what_safetensors_itself_refuses_is_refused_by_name(file):
    """400 files with damaged headers and lengths: never a traceback, and never a file that cannot be opened."""
    whole, dice = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(min(600, len(whole)))] = dice.randrange(256)
        file.write_bytes(bytes(damaged[: dice.choice([len(whole), dice.randrange(len(whole))])]))
        try:
            read_header(file)
        except ThreestepError as mistake:
            assert str(file) in str(mistake)
            refused += 1
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                list(opened.keys())
        except SafetensorError as problem:  # a type that only newer ones know, say
            assert "dtype" in str(problem) or "variant" in str(problem) or "Metadata" in str(problem), problem
    assert refused > 200


def test_an_index_names_its_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name, file in names.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    assert weight_files(tmp_path) == [tmp_path / file for file in names.values()]
    check_model_folder(str(tmp_path))
    (tmp_path / "model-2.safetensors").write_bytes((tmp_path / "model-2.safetensors").read_bytes()[:-1])
    with pytest.raises(ThreestepError, match=r"model-2.safetensors': expected at least \d+ bytes"):
        check_model_folder(str(tmp_path))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ThreestepError, match="names 2 weight files, but 1 of them are missing, .* model-2.safetensors"):
        check_model_folder(str(tmp_path))
    for text in ("", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ThreestepError, match=r"index.json' is damaged: it has no weight_map from tensors to"):
            check_model_folder(str(tmp_path))


def test_a_file_that_the_configuration_names(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "transformers_weights": "own.safetensors"}')
    save_file({"a": TENSORS["a"]}, tmp_path / "own.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path, "own.safetensors") == [tmp_path / "own.safetensors"]
    (tmp_path / "own.safetensors").write_bytes(b"")
    with pytest.raises(ThreestepError, match="own.safetensors': expected at least 8 bytes"):
        check_model_folder(str(tmp_path))


FIELD = "zipped"


class Zipped(StoredForm):
    """Weights that are whole where their field says 1."""

    def check_entry(self, entry, file):
        if not isinstance(entry, int):
            raise ThreestepError(f"'{file}' expects in {FIELD} a number, got {entry!r}")

    def check(self, config, where):
        config.seen = where

    def check_trains(self, config, where):
        if not self.is_read_whole(config):
            raise ThreestepError(f"'{where}' cannot be trained")

    def is_read_whole(self, config):
        return getattr(config.get_text_config(), FIELD) == 1

    def forget(self, config):
        delattr(config.get_text_config(), FIELD)


@pytest.fixture
def zipped(monkeypatch):
    forms = {"stored_forms": {FIELD: f"{__name__}:Zipped"}}
    monkeypatch.setattr(module, "added", lambda table, known: forms.get(table, {}))
    monkeypatch.setattr(module, "missing", lambda table: {})


@pytest.mark.parametrize("nested", [False, True])
def test_the_plugin_that_knows_the_field_is_asked(zipped, nested):
    for value in (1, 2):
        config: Any = PreTrainedConfig() if nested else PreTrainedConfig(**{FIELD: value})
        if nested:
            config.text_config = PreTrainedConfig(**{FIELD: value})
        check_form(config, "FOLDER")
        form = stored_form(config)
        assert config.seen == "FOLDER" and not isinstance(form, WholeWeights)
        assert form.is_read_whole(config) is (value == 1)
        with nullcontext() if value == 1 else pytest.raises(ThreestepError, match="'FOLDER' cannot be trained"):
            form.check_trains(config, "FOLDER")
        form.forget(config)
        whole = stored_form(config)
        assert isinstance(whole, WholeWeights) and whole.is_read_whole(config)


def with_field(folder: str, value: Any) -> str:
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {FIELD: value}))
    return folder


def test_a_folder_is_checked_before_its_configuration_is_read(zipped, save_folder):
    folder = with_field(save_folder(), "much")
    with pytest.raises(ThreestepError, match=f"'{folder}/config.json' expects in zipped a number, got 'much'"):
        load_config(folder)
    assert load_config(with_field(folder, 1)).seen == folder


def test_the_plugin_that_is_not_there_is_named(monkeypatch, save_folder, tmp_path):
    """For a form of weights, and for adapters."""
    missing = {"stored_forms": {FIELD: "zips"}, "adapters": {"adapter_config.json": "lora"}}
    monkeypatch.setattr(module, "added", lambda table, known: {})
    monkeypatch.setattr(module, "missing", missing.get)
    monkeypatch.setattr(module, "missing_plugin", lambda table, name: f"this needs the plugin of {table} for {name}")
    folder = save_folder()
    assert find_adapter(folder) is None and model_of(folder) == folder and find_adapter("a/name") is None
    with pytest.raises(
        ThreestepError, match=f"'{folder}' has zipped in its config.json, .* in a special form; this needs"
    ):
        load_config(with_field(folder, 2))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    for read in (find_adapter, model_of, load_config):
        with pytest.raises(ThreestepError, match="holds adapter_config.json but .*the plugin of adapters for"):
            read(str(tmp_path))
