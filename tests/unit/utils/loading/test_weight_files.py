"""Damaged safetensors are found by their headers, and named."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from training.utils.base.errors import ThreestepError
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.loading.weight_files import read_header, weight_files

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
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert (found["b"].dtype, found["a"].dtype, found["b"].file) == ("BF16", "I64", file)
    check_model_folder(str(file.parent))


@pytest.mark.parametrize("kept", [0, 5, 8, 20, -1, -40])
def test_a_file_that_is_cut_off(file, kept):
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    words = rf"model.safetensors': expected at least [\d,]+ bytes by its header, got {len(whole[:kept]):,}: .*cut off"
    with pytest.raises(ThreestepError, match=words):
        check_model_folder(str(file.parent))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: whole + b"more", " is damaged: 4 bytes follow its last tensor; download"),
        (
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n",
            ": .* Git LFS's pointer",
        ),
        (lambda _: b"PK\x03\x04 a zip file, as torch.save writes it", " is damaged: its header would have"),
    ],
)
def test_something_else_by_that_name(file, content, words):
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ThreestepError, match=f"model.safetensors'{words}"):
        check_model_folder(str(file.parent))


@pytest.mark.parametrize(
    "header",
    [b"not JSON", b"[" * 100_000, b"\xff\xfe", [], "text", {"a": None}, {"a": {"dtype": "F32", "shape": [2]}},
     {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
     {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}],
    ids=lambda header: str(header)[:30],
)  # fmt: skip
def test_a_header_that_is_none(file, header):
    with_header(file, header)
    with pytest.raises(ThreestepError, match="model.safetensors' is damaged"):
        check_model_folder(str(file.parent))


@pytest.mark.parametrize("change", ["moved", "longer", "overlaps"])
def test_tensors_that_are_not_where_the_header_says(file, change):
    header = header_of(file)
    entry = header["b"]
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = {"moved": [begin + 1, end + 1], "longer": [begin, end + 2], "overlaps": [0, end - begin]}[
        change
    ]
    with_header(file, header)
    with pytest.raises(ThreestepError, match=r"model.safetensors' is damaged: \w+ \(\w+ \[[\d, ]*\]\) is said to be"):
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
    with pytest.raises(
        ThreestepError, match="names 2 files of weights and 1 of them are not there, .* model-2.safetensors"
    ):
        check_model_folder(str(tmp_path))
    for text in ("", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ThreestepError, match=r"index.json' is damaged: it holds no weight_map from tensors to"):
            check_model_folder(str(tmp_path))


def test_a_file_that_the_configuration_names(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "transformers_weights": "own.safetensors"}')
    save_file({"a": TENSORS["a"]}, tmp_path / "own.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path, "own.safetensors") == [tmp_path / "own.safetensors"]
    (tmp_path / "own.safetensors").write_bytes(b"")
    with pytest.raises(ThreestepError, match="own.safetensors': expected at least 8 bytes"):
        check_model_folder(str(tmp_path))


def test_headers_of_a_large_model_take_no_time(tmp_path):
    """Thirty files of a model of 70B, their values holes in the files."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {}
    for number in range(30):
        name = f"model-{number:05d}-of-00030.safetensors"
        header, at = {}, 0
        for tensor in range(25):
            size = 8192 * 8192 * 2
            header[f"model.layers.{number}.{tensor}.weight"] = {
                "dtype": "BF16", "shape": [8192, 8192], "data_offsets": [at, at + size],
            }  # fmt: skip
            weight_map[f"model.layers.{number}.{tensor}.weight"] = name
            at += size
        text = json.dumps(header).encode()
        with (tmp_path / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    started = time.perf_counter()
    check_model_folder(str(tmp_path))
    assert time.perf_counter() - started < 1.0  # 10 ms on an idle core


def test_what_is_read_is_what_safetensors_reads(file):
    stored = read_header(file)
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("notes", [{"format": 3}, {"format": ["pt"]}, {"format": None}])
def test_metadata_that_is_no_text(tmp_path, notes):
    """safetensors does not open such a file."""
    text = json.dumps({"__metadata__": notes}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ThreestepError, match="is damaged: the __metadata__ of its header holds more than texts"):
        read_header(file)
