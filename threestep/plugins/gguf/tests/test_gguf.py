"""GGUF files as models to start from: weights, tokenizer, the made folder, and refusals.

The files are written by gguf's own writer, as llama.cpp's converter writes them: with its names of tensors, and with
Llama's queries and keys in its order of rotary dimensions.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from threestep.plugins.gguf import files
from threestep.plugins.gguf.files import as_folder
from threestep.plugins.gguf.tokenizer import _LLAMA3, _QWEN2
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.models.arguments import ModelArguments

gguf = pytest.importorskip("gguf", reason="the package gguf, which the extra `gguf` adds, is not installed")

WIDTH, HEADS, KEYS, LAYERS = 64, 4, 2, 2
TEXTS = [*SENTENCES, "it's  a\n\n  naïve café: 12345 and  7!", "ＡＢ e\u0301 don't 'Tis\t\tno"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KINDS = ("F32", "Q8_0", "Q4_1")


def tiny_model(family: str):
    config = AutoConfig.for_model(
        family, vocab_size=384, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS,
        head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weights in model.parameters():  # biases and norms too
        torch.nn.init.normal_(weights, std=0.3)
    return model


def in_llama_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp keeps them: the two halves of a head's rotary dimensions in turns."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, family="llama", kind="F32", tokenizer=None, pre="gpt-2", tensors=(), **changes):
    """Write a GGUF file; return the model with its dequantized tensors as weights. changes: to the metadata; None
    leaves a key out."""
    tokenizer = tokenizer or train_tokenizer(TEXTS)
    model, config = tiny_model(family), {}
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, family)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], LAYERS)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        stem, _, ending = name.rpartition(".")
        weight, heads = tensor.numpy(), {"q_proj": HEADS, "k_proj": KEYS}.get(stem.rpartition(".")[2])
        type_ = kinds[kind] if weight.ndim > 1 else kinds.F32
        packed = gguf.quantize(weight, type_)
        state[name].copy_(torch.from_numpy(gguf.dequantize(packed, type_)))
        if family == "llama" and heads and ending == "weight":
            packed = in_llama_order(packed, heads)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", np.ascontiguousarray(packed), raw_dtype=type_)
    for name, weight in tensors:
        writer.add_tensor(name, weight)
    model.load_state_dict(state)
    words = [tokenizer.convert_ids_to_tokens(number) for number in range(len(tokenizer))]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    config |= {f"{family}.{key}": value for key, value in (
        ("context_length", 256), ("embedding_length", WIDTH), ("block_count", LAYERS), ("feed_forward_length", 96),
        ("attention.head_count", HEADS), ("attention.head_count_kv", KEYS), ("rope.dimension_count", WIDTH // HEADS),
        ("rope.freq_base", 10_000.0), ("attention.layer_norm_rms_epsilon", 1e-6), ("vocab_size", 384),
    )}  # fmt: skip
    config |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in tokenizer.all_special_tokens else 1 for word in words],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    for key, value in {**config, **changes}.items():
        kind_of = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            kind_of[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_logits_are_those_of_the_dequantized_tensors_in_plain_transformers(family, kind, tmp_path, capsys):
    model = write(tmp_path / "tiny.gguf", family, kind)
    folder = as_folder(str(tmp_path / "tiny.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.dtype == torch.float32
    assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
    assert f"tiny.gguf ({kind}, {model.num_parameters():,} weights)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", None),
        ("smollm", r"\p{N}|[^\p{N}]+"),  # digits first, then GPT-2's pieces
        ("llama-bpe", _LLAMA3),
        ("qwen2", _QWEN2),
    ],
)
def test_the_tokenizer_is_the_one_that_the_file_was_written_with(pre, pieces, tmp_path):
    own = train_tokenizer(TEXTS, pieces=pieces)
    if pre == "smollm":  # as SmolLM2's tokenizer.json has it
        from tokenizers import pre_tokenizers

        digits, in_bytes = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        own.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    write(tmp_path / "tiny.gguf", pre=pre, tokenizer=own)
    read = AutoTokenizer.from_pretrained(as_folder(str(tmp_path)))
    texts = [text for text in TEXTS if pre != "qwen2" or "\u0301" not in text]  # which Qwen2's own tokenizer composes
    texts += [f"{word}{own.eos_token} {word}" for word in ("two  5", "x")]
    assert [read(text).input_ids for text in texts] == [own(text).input_ids for text in texts]
    assert [read.decode(own(text).input_ids) for text in texts] == texts
    assert (read.eos_token, read.pad_token, read.chat_template) == (own.eos_token, own.pad_token, TEMPLATE)


def test_qwen2_composes_letters_and_a_begin_is_added_where_the_file_says_so(tmp_path):
    own = train_tokenizer(TEXTS, pieces=_QWEN2)
    begins = {"tokenizer.ggml.bos_token_id": own.pad_token_id}
    write(tmp_path / "tiny.gguf", pre="qwen2", tokenizer=own, **begins)
    read = AutoTokenizer.from_pretrained(as_folder(str(tmp_path)))
    assert read("e\u0301").input_ids == own("\xe9").input_ids != own("e\u0301").input_ids
    write(tmp_path / "tiny.gguf", pre="llama-bpe", tokenizer=own, **begins)  # llama.cpp begins those by default
    read = AutoTokenizer.from_pretrained(as_folder(str(tmp_path)))
    assert read("a").input_ids == [own.pad_token_id, *own("a").input_ids]


def test_a_response_may_end_at_each_end_that_the_file_names(tmp_path):
    write(tmp_path / "tiny.gguf", **{"tokenizer.ggml.eot_token_id": 7})
    ends = json.loads((tmp_path / as_folder(str(tmp_path)) / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [train_tokenizer(TEXTS).eos_token_id, 7]


def test_a_folder_is_made_once_and_again_for_another_file(tmp_path, capsys):
    path = tmp_path / "tiny.gguf"
    write(path)
    first = as_folder(str(path))
    assert "for the first time" in capsys.readouterr().out
    assert as_folder(str(path)) == first
    assert "for the first time" not in capsys.readouterr().out
    write(path, kind="Q8_0")
    assert as_folder(str(path)) != first


def test_flags_that_name_models_read_files_and_leave_other_names(tmp_path):
    write(tmp_path / "tiny.gguf")
    (flags,) = parse_arguments([ModelArguments], ["--model_name_or_path", str(tmp_path / "tiny.gguf")], "")
    assert flags.model_name_or_path == as_folder(str(tmp_path))
    for name in ("owner/name", "gpt2", str(tmp_path / "nothing")):
        assert as_folder(name) == name
    (tmp_path / "model.safetensors").touch()  # beside the safetensors, a GGUF file is a copy
    assert as_folder(str(tmp_path)) == str(tmp_path)


ROPE = np.ones(8, dtype=np.float32)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            {"general.architecture": "mamba"},
            "contains a model of the family 'mamba', but only GGUF files of llama, qwen2, qwen3",
        ),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer; pass the model folder that the file was made from$"),
        (
            {"tokenizer.ggml.model": "llama"},
            "contains a tokenizer of the kind 'llama' that splits words as 'gpt-2', but",
        ),
        (
            {"tokenizer.ggml.pre": "tekken"},
            "of the kind 'gpt2' that splits words as 'tekken', but only 'gpt2' with gpt-2,",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "does not read its settings llama.rope.scaling.type, so the model would"),
        ({"llama.attention.key_length": 99}, "does not read its settings llama.attention.key_length, so"),
        (
            {"tensors": [("rope_freqs.weight", ROPE)]},
            r"does not read 8 of its weights \(rope_freqs.weight\), so",
        ),
        (
            {"split.count": 2},
            "is one of 2 parts; join them with llama.cpp's llama-gguf-split --merge, or pass the model",
        ),
    ],
)
def test_what_would_not_be_read_whole_is_refused(made, sentence, tmp_path):
    write(tmp_path / "tiny.gguf", **made)
    with pytest.raises(ThreestepError, match=sentence):
        as_folder(str(tmp_path))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_damaged_missing_and_split_files(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path)
    for bytes_left in (10, 2000, path.stat().st_size - 100):
        (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:bytes_left])
        with pytest.raises(
            ThreestepError, match=r"cut.gguf' is not a complete GGUF file \(.*\); download or copy it again"
        ):
            as_folder(str(tmp_path / "cut.gguf"))
    with pytest.raises(ThreestepError, match=re.escape(f"'{tmp_path}' holds 2 GGUF files (cut.gguf, tiny.gguf); pass")):
        as_folder(str(tmp_path))
    with pytest.raises(ThreestepError, match="the file '.*tinny.gguf' does not exist; did you mean '.*/tiny.gguf'"):
        as_folder(str(tmp_path / "tinny.gguf"))
    split = tmp_path / "big-00002-of-00003.gguf"
    split.touch()
    merge = "one of 3 parts; join them with llama.cpp: llama-gguf-split --merge .*big-00001-of-00003.gguf big.gguf; or"
    with pytest.raises(ThreestepError, match=merge):
        as_folder(str(split))
