"""A saved folder is a plain transformers model, whole, with its tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.tiny_models import FAMILIES, tiny_causal_lm, tiny_scalar_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.engine.zero3 import full_tensors
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import load_scalar_model
from training.utils.loading.saving import mend_settings, save_model
from training.utils.loading.tokenizers import load_tokenizer, with_pad_apart
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in full_tensors(model, zero_stage=0)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_comes_back_to_the_bit(tmp_path, tiny_tokenizer, family, dtype):
    model = tiny_causal_lm(family, dtype, vocab_size=len(tiny_tokenizer))
    model.generation_config.max_new_tokens = 77
    save_model(tmp_path / "model", model, state_of(model), tiny_tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.dtype == dtype
    assert type(loaded) is type(model)
    assert loaded.generation_config.max_new_tokens == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tiny_tokenizer.get_vocab()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model"]  # nothing half-written stays beside it
    assert not list((tmp_path / "model").glob("*.bin"))


def test_a_save_replaces_the_folder_or_leaves_the_old_one(tmp_path, tiny_tokenizer, monkeypatch):
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale.safetensors").write_text("old")
    save_model(str(tmp_path / "model"), model, state_of(model), tiny_tokenizer)
    assert not (tmp_path / "model" / "stale.safetensors").exists()  # a new save replaces the folder whole
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)

    def full_disk(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(type(tiny_tokenizer), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_model(tmp_path / "model", model, state_of(model), tiny_tokenizer)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("change", ["lacking", "unknown"])
def test_tensors_that_are_not_the_models_are_not_saved(tmp_path, tiny_tokenizer, family, change):
    """Tied weights (GPT-2's head) are not lacking."""
    model = tiny_causal_lm(family, vocab_size=len(tiny_tokenizer))
    state = state_of(model)
    whole = {name: each for name, each in state.items() if family == "llama" or "lm_head" not in name}
    save_model(tmp_path / "whole", model, whole, tiny_tokenizer)
    name = sorted(state)[3]
    if change == "lacking":
        state.pop(name)
        words = f"cannot save .*: it lacks 1 tensors .{name}. and has 0 that the plain model lacks"
    else:
        state[f"module.{name}"] = state[name]
        words = f"it lacks 0 tensors and has 1 that the plain model lacks .module.{name}.; export"
    with pytest.raises(ThreestepError, match=words):
        save_model(tmp_path / "model", model, state, tiny_tokenizer)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_a_reward_model_loads_in_plain_transformers_with_the_trainers_scores(tmp_path, save_folder, family, pad_is_eos):
    """Responses end with eos; where pad is eos, plain transformers would read the score before it."""
    tokenizer = train_tokenizer(SENTENCES, pad_is_eos=pad_is_eos)
    start = save_folder("sft", family=family, tokenizer=tokenizer)
    tokenizer = with_pad_apart(load_tokenizer(start), None)
    scorer = load_scalar_model(ModelSettings(start), torch.float32, tokenizer, must_have_head=False).eval()
    torch.nn.init.normal_(scorer.score.weight, generator=torch.Generator().manual_seed(3))
    texts = [sentence + tokenizer.eos_token for sentence in SENTENCES]
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    assert all(one[-1] == tokenizer.eos_token_id for one in ids)
    rows = padded_rows(
        [TokenSequence(one, torch.zeros(len(one), dtype=torch.bool)) for one in ids], tokenizer.pad_token_id
    )
    with torch.no_grad():
        scores_B = ScalarModel(scorer)(rows)
    save_model(tmp_path / "reward", scorer, state_of(scorer), tokenizer)

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    plain_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    batch = plain_tokenizer(texts, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        plain_B = plain(**batch, use_cache=False).logits[:, 0]
    assert plain.config.num_labels == 1
    assert plain_tokenizer.pad_token_id != plain_tokenizer.eos_token_id
    assert scores_B.std() > 0.1  # scores that differ: an equality of constants would say nothing
    torch.testing.assert_close(plain_B, scores_B, rtol=1e-5, atol=1e-5)
    again = load_scalar_model(
        ModelSettings(str(tmp_path / "reward")), torch.float32, plain_tokenizer, must_have_head=True
    )
    assert torch.equal(again.score.weight, scorer.score.weight)


SAMPLING = '; to keep the sampling settings, set "do_sample": true in its generation_config.json'


@pytest.mark.parametrize(
    ("given", "unset", "advice"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, ["temperature", "top_p"], SAMPLING),  # Vicuna's
        ({"temperature": 0.0, "do_sample": False}, ["temperature"], SAMPLING),
        ({"pad_token_id": -1}, ["pad_token_id"], ""),
        ({"early_stopping": True, "length_penalty": 0.5}, ["early_stopping", "length_penalty"], ""),
        ({"use_cache": False, "cache_implementation": "static"}, ["cache_implementation"], ""),
        ({"output_scores": True}, ["output_scores"], ""),
    ],
)
def test_settings_of_generation_that_have_no_effect_are_not_saved(tmp_path, tiny_tokenizer, given, unset, advice):
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer))
    model.name_or_path = "START"
    for name, value in {**given, "max_new_tokens": 9}.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):  # by transformers itself
        model.generation_config.save_pretrained(tmp_path)
    named = ", ".join(f"{name} {given[name]}" for name in unset)
    assert mend_settings(model) == [
        f"'START': its generation settings have {named}, which transformers ignores given the other settings and "
        f"refuses to save; saved models omit them{advice}"
    ]
    assert mend_settings(model) == []
    save_model(tmp_path / "model", model, state_of(model), tiny_tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert loaded.max_new_tokens == 9 and all(getattr(loaded, name) is None for name in unset)
    kept = {name: value for name, value in given.items() if name not in unset and value}
    assert all(getattr(loaded, name) == value for name, value in kept.items())


def test_settings_of_generation_that_contradict_themselves():
    model = tiny_causal_lm("llama")
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.9
    assert mend_settings(model) == [] and model.generation_config.temperature == 0.9  # what has an effect stays
    model.generation_config.do_sample, model.generation_config.num_return_sequences = False, 3
    with pytest.raises(ThreestepError, match="generation settings .* could not be saved with the model .*: Greedy"):
        mend_settings(model)


@pytest.mark.parametrize("scalar", [False, True])
def test_settings_of_generation_in_the_configuration_are_not_saved_there(tmp_path, tiny_tokenizer, scalar):
    make = tiny_scalar_model if scalar else tiny_causal_lm
    model = make("llama", vocab_size=len(tiny_tokenizer))
    model.name_or_path, model.config.temperature = "START", 0.7
    with pytest.raises(ValueError, match="generation parameters are set in the model config"):
        model.config.save_pretrained(tmp_path)
    assert mend_settings(model) == [
        "'START': config.json has temperature 0.7, which transformers reads only from generation_config.json and "
        "refuses to save in config.json; saved models omit them"
    ]
    save_model(tmp_path / "model", model, state_of(model), tiny_tokenizer)
    assert not hasattr(type(model).from_pretrained(tmp_path / "model").config, "temperature")


def test_a_setting_that_transformers_refuses_beside_sdpa(tmp_path, tiny_tokenizer):
    tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path / "start")
    file = tmp_path / "start" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_attentions": True}))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    with pytest.raises(StrictDataclassClassValidationError, match="is not supported when using the `attn_impl"):
        model.save_pretrained(tmp_path / "by transformers")
    (said,) = mend_settings(model)
    assert "config.json has output_attentions, which transformers refuses to save with any attention but" in said
    save_model(tmp_path / "model", model, state_of(model), tiny_tokenizer)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
