"""Models that are loaded, and every mistake that is told in a sentence; weights that a folder freezes; merged weights,
made when they are copied, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.integrations import deepspeed as sharding

from tests.support.lora_settings import lora_settings
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from tests.unit.utils.loading.conftest import edit_json
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.rows import padded_rows
from training.utils.loading.configurations import load_config
from training.utils.loading.merged_weights import MergedWeight, merged_when_copied
from training.utils.loading.models import FROZEN, freeze_named, freeze_parts, load_causal_lm, load_scalar_model
from training.utils.loading.tokenizers import add_tokens, load_tokenizer, with_pad_apart
from training.utils.models.layout_check import notes_on
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel

TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


def test_a_name_that_no_hub_has(tiny_tokenizer):
    for load in (
        lambda: load_causal_lm(ModelSettings("no/such-model"), torch.float32, 1),
        lambda: load_scalar_model(ModelSettings("no/such-model"), torch.float32, tiny_tokenizer, must_have_head=True),
    ):
        with pytest.raises(ThreestepError, match="no model could be loaded from 'no/such-model': "):
            load()
    with pytest.raises(ThreestepError, match="no tokenizer could be loaded from 'no/such-model': "):
        load_tokenizer("no/such-model")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_is_no_language_model(tmp_path, family):
    """It would train as one: each token sees the one that it is to predict."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(family, vocab_size=64, **sizes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ThreestepError, match=f"got an encoder .{family} with is_decoder false in config.json.*; use"):
        load_causal_lm(ModelSettings(str(tmp_path / "encoder")), torch.float32, 1)
    config.is_decoder = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "decoder")
    load_causal_lm(ModelSettings(str(tmp_path / "decoder")), torch.float32, 1)


@pytest.mark.parametrize("scalar", [False, True])
def test_a_model_keeps_its_weights_and_takes_the_dtype(save_folder, tiny_tokenizer, scalar):
    settings, size = ModelSettings(save_folder(scalar=scalar)), len(tiny_tokenizer)
    if scalar:
        model = load_scalar_model(settings, torch.bfloat16, tiny_tokenizer, must_have_head=True)
        own = tiny_scalar_model("llama", vocab_size=size).score.weight
        assert torch.equal(model.score.weight, own.bfloat16())
        assert model.config.pad_token_id == tiny_tokenizer.pad_token_id
    else:
        model = load_causal_lm(settings, torch.bfloat16, size)
        assert torch.equal(model.lm_head.weight, tiny_causal_lm("llama", vocab_size=size).lm_head.weight.bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_vocabulary_larger_than_the_embedding(save_folder, tiny_tokenizer):
    """Also where tokens are added to one that was too large before."""
    size = len(tiny_tokenizer)
    folder = save_folder(vocab_size=size - 1)
    for added in (0, 4):
        with pytest.raises(ThreestepError, match=rf"has {size} tokens, but its model embeds {size - 1}"):
            load_causal_lm(ModelSettings(folder), torch.float32, size + added, added)
    folder = save_folder("reward", scalar=True, vocab_size=len(tiny_tokenizer) - 1)
    with pytest.raises(ThreestepError, match="tokens, but its model embeds"):
        load_scalar_model(ModelSettings(folder), torch.float32, tiny_tokenizer, must_have_head=True)


def test_a_language_model_where_a_reward_model_is_expected(save_folder, tiny_tokenizer):
    """Its scalar head would be random: DeepSpeed-Chat's rw_eval.py scored with such a head for a year."""
    settings = ModelSettings(save_folder())
    with pytest.raises(ThreestepError, match="expected a model for sequence classification, got LlamaForCausalLM"):
        load_scalar_model(settings, torch.float32, tiny_tokenizer, must_have_head=True)
    made_up = load_scalar_model(settings, torch.float32, tiny_tokenizer, must_have_head=False)
    assert made_up.score.weight.shape == (1, 32)


def test_where_pad_was_eos_the_embeddings_grow_and_eos_trains(save_folder):
    """torch gives the embedding of `padding_idx` no gradient, and the score is read at eos."""
    tokenizer = train_tokenizer(SENTENCES, pad_is_eos=True)
    eos, size = tokenizer.eos_token_id, len(tokenizer)
    folder = save_folder(tokenizer=tokenizer, vocab_size=size)
    tokenizer = with_pad_apart(load_tokenizer(folder), None)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("<|pad|>", size, size + 1)
    model = load_scalar_model(ModelSettings(folder), torch.float32, tokenizer, must_have_head=False)
    assert model.config.vocab_size >= size + 1 and model.config.vocab_size % 8 == 0
    assert model.config.pad_token_id == size
    own = tiny_causal_lm("llama", vocab_size=size, pad_token_id=eos)
    assert torch.equal(model.get_input_embeddings().weight[:size], own.get_input_embeddings().weight)
    ids = torch.tensor([5, 6, eos])
    ScalarModel(model)(padded_rows([TokenSequence(ids, torch.zeros(3, dtype=torch.bool))], size)).sum().backward()
    assert model.get_input_embeddings().weight.grad[eos].abs().max() > 0


def test_code_of_a_model_runs_where_it_is_asked_for(save_folder, tmp_path, monkeypatch):
    """Not otherwise, nor is anybody asked at the terminal."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_folder()
    marker = tmp_path / "ran"
    code = "from transformers import LlamaConfig\n" + f"open({str(marker)!r}, 'w').close()\n"
    (Path(folder) / "own.py").write_text(code + "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n")
    edit_json(f"{folder}/config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    edit_json(f"{folder}/tokenizer_config.json", **own)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked at the terminal"))
    for load in (
        lambda: load_config(folder),
        lambda: load_tokenizer(folder),
        lambda: load_causal_lm(ModelSettings(folder), torch.float32, 1),
    ):
        with pytest.raises(ThreestepError, match="comes with its own Python code, .* --trust_remote_code true"):
            load()
    assert not marker.exists()
    assert load_config(folder, trust_remote_code=True).model_type == "own" and marker.exists()


def test_gradient_checkpointing_changes_no_gradient(save_folder, tiny_tokenizer):
    folder = save_folder()
    gradients = []
    for checkpointing in (False, True):
        settings = ModelSettings(folder, gradient_checkpointing=checkpointing)
        model = load_causal_lm(settings, torch.float32, len(tiny_tokenizer)).train()
        assert model.is_gradient_checkpointing == checkpointing
        model(torch.arange(3, 15)[None], use_cache=False).logits.square().mean().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_embeddings_grow_to_added_tokens_around_their_mean(save_folder, family):
    """GPT-2 and OPT tie input and output; here Llama does not."""
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(family=family, tokenizer=tokenizer)
    size = len(tokenizer)
    added = add_tokens(tokenizer, TAGS)
    before = load_causal_lm(ModelSettings(folder), torch.float32, size)
    after = load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer), added)
    assert after.config.vocab_size == len(tokenizer) == size + 4  # no row that could be sampled and is no token
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, name)().weight.detach() for model in (before, after))
        assert new.shape[0] == size + 4 and torch.equal(new[:size], old)
        # rows of a multivariate normal of a billionth of the old covariance: within 1e-3 of the spread
        assert float((new[size:] - old.mean(0)).abs().max()) < 1e-3 * float(old.std())
    spare = save_folder("spare", family=family, tokenizer=tokenizer, vocab_size=size + 10)  # whose rows serve them
    assert load_causal_lm(ModelSettings(spare), torch.float32, len(tokenizer), added).config.vocab_size == size + 10
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits[..., :size])


@pytest.mark.parametrize("scalar", [False, True])
def test_added_tokens_train_beside_lora(save_folder, scalar):
    """Frozen, four tags would keep one embedding for good."""
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(tokenizer=tokenizer)
    added = add_tokens(tokenizer, TAGS)

    notes: list[str] = []

    def trains(added: int, **lora: int) -> set[str]:
        settings = lora_settings(folder, **(lora or {"lora_dim": 2}))
        if scalar:
            model = load_scalar_model(settings, torch.float32, tokenizer, must_have_head=False, added_tokens=added)
        else:
            model = load_causal_lm(settings, torch.float32, len(tokenizer) - 4 + added, added)
        notes[:] = [note for note in notes_on(model) if "tokens were added" in note]
        return {name for name, part in model.named_parameters() if part.requires_grad and "lora" not in name}

    head = {"score.weight"} if scalar else set()
    assert trains(0) == head and not notes
    assert trains(added) == {"model.embed_tokens.weight", "score.weight" if scalar else "lm_head.weight"}
    rows = (len(tokenizer) + 7) // 8 * 8 if scalar else 2 * len(tokenizer)  # of 32 numbers each
    assert f" {rows * 32:,} parameters (" in notes[0]
    trains(added, lora_dim=0)
    assert not notes


def test_a_pad_token_of_its_own_gets_a_row_that_does_not_train(save_folder):
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(tokenizer=tokenizer, vocab_size=len(tokenizer))
    size = len(tokenizer) + 1
    model = load_causal_lm(lora_settings(folder, lora_dim=2), torch.float32, size, added_pad=1)
    assert model.config.vocab_size == size
    assert all("lora" in name for name, part in model.named_parameters() if part.requires_grad)
    with pytest.raises(ThreestepError, match=f"has {size} tokens, but its model embeds {size - 1}"):
        load_causal_lm(ModelSettings(folder), torch.float32, size + 1, added_pad=1)


NORM, PROJECTION = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


def trained(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def naming(folder, *names):
    (folder / FROZEN).write_text("".join(f"{name}\n" for name in names))
    return ModelSettings(str(folder))


def test_a_text_model_has_no_projector_to_freeze():
    model = tiny_causal_lm("llama")
    freeze_parts(model, ModelSettings("m"))
    assert trained(model) == {name for name, _ in model.named_parameters()}
    with pytest.raises(ThreestepError, match="^--freeze_projector expects an image-text model .* got LlamaFor"):
        freeze_parts(model, ModelSettings("m", freeze_projector=True))


def test_weights_that_the_folder_names_do_not_train(tmp_path, capsys):
    model = tiny_causal_lm("llama")
    freeze_named(model, ModelSettings(str(tmp_path)), False)  # which names none
    assert trained(model) == {name for name, _ in model.named_parameters()}
    freeze_named(model, naming(tmp_path, NORM, PROJECTION), False)
    assert trained(model) == {name for name, _ in model.named_parameters()} - {NORM, PROJECTION}
    assert f"model: 2 of 21 weights are frozen ({tmp_path / FROZEN})" in capsys.readouterr().out


def test_a_name_that_the_model_lacks(tmp_path):
    """A scalar model lacks the output layer of its language model, and nothing else."""
    scalar = tiny_scalar_model("llama")
    freeze_named(scalar, naming(tmp_path, NORM, "lm_head.weight"), False)
    assert trained(scalar) == {name for name, _ in scalar.named_parameters()} - {NORM}
    with pytest.raises(ThreestepError, match=f"{FROZEN} names model.nor, which the trained model, LlamaForSeq"):
        freeze_named(scalar, naming(tmp_path, "model.nor"), False)


@pytest.mark.parametrize("scores", [False, True])
def test_adapters_train_on_a_model_that_is_frozen_as_a_whole(tmp_path, scores):
    """Also below a new head, which the language model that was frozen does not have."""
    model = tiny_causal_lm("llama")
    settings = naming(tmp_path, *(name for name, _ in model.named_parameters()))
    adapted = add_lora(tiny_scalar_model("llama") if scores else model, Lora(2))
    freeze_named(adapted, settings, False)
    assert {name for name in trained(adapted) if ".lora_" not in name} == ({"score.weight"} if scores else set())


def test_adapters_do_not_move_what_is_frozen(tmp_path):
    model, other = tiny_causal_lm("llama"), tiny_causal_lm("llama")
    settings = naming(tmp_path, PROJECTION)
    with pytest.raises(
        ThreestepError, match=f"^adapters are attached to {PROJECTION} and 0 other weights that are frozen"
    ):
        freeze_named(add_lora(model, Lora(2)), settings, False)
    freeze_named(add_lora(other, Lora(2, lora_module_name="v_proj")), settings, False)
    settings = naming(tmp_path, "model.embed_tokens.weight")
    with pytest.raises(ThreestepError, match="^tokens were added to the tokenizer, so the embeddings must train, but"):
        freeze_named(tiny_causal_lm("llama"), settings, True)


FILES = {
    **{f"layer.experts.{number}.{half}.weight": torch.randn(3, 2) for number in range(4) for half in ("gate", "up")},
    "layer.qkv.weight": torch.randn(6, 2),
    "old_norm.weight": torch.randn(2),
    "unknown.weight": torch.randn(2),
}
NAMES = ("layer.experts.gate_up", "layer.q.weight", "layer.k.weight", "layer.v.weight", "norm.weight")
merging = vars(sharding)  # the function is looked up where transformers does


@pytest.fixture(autouse=True)
def zero3(monkeypatch):
    monkeypatch.setattr(sharding, "is_deepspeed_zero3_enabled", lambda: True)


def rules(merge=MergeModulelist):
    experts = ["experts.*.gate.weight", "experts.*.up.weight"]
    return [
        WeightRenaming("old_norm", "norm"),
        WeightConverter(experts, "experts.gate_up", operations=[merge(dim=0), Concatenate(dim=1)]),
        WeightConverter("layer.qkv", ["layer.q", "layer.k", "layer.v"], operations=[Chunk(dim=0)]),
    ]


class Model(nn.Module):
    base_model_prefix, config = "", SimpleNamespace()

    def state_dict(self):
        return {name: torch.empty(0) for name in NAMES}


def converted(weight_mapping):
    return merging["_apply_weight_conversions_to_state_dict"](Model(), dict(FILES), weight_mapping)


def test_what_is_copied_is_what_transformers_merges():
    whole = converted(rules())
    with merged_when_copied():
        late = converted(rules())
    assert late.keys() == whole.keys() == set(NAMES)
    for name, weight in whole.items():
        assert isinstance(late[name], MergedWeight) == (name != "norm.weight")
        assert late[name].shape == weight.shape
        assert torch.equal(torch.empty_like(weight).copy_(late[name]), weight)
    assert isinstance(converted(rules())["layer.experts.gate_up"], torch.Tensor)  # outside


class ReadsValues(MergeModulelist):
    def convert(self, input_dict, *args, **others):
        for tensors in input_dict.values():
            float(tensors[0].sum())  # without values there is none
        return super().convert(input_dict, *args, **others)


def test_rules_that_read_values_are_followed_at_once_and_named(capsys, monkeypatch):
    with merged_when_copied():
        at_once = converted(rules(ReadsValues))
    assert all(torch.equal(at_once[name], weight) for name, weight in converted(rules()).items())
    said = capsys.readouterr().out
    assert "are merged on every rank at once" in said and "(Model: RuntimeError: " in said
    with merged_when_copied():
        converted(rules())
    assert not capsys.readouterr().out
    monkeypatch.delattr(sharding, "_apply_weight_conversions_to_state_dict")
    with merged_when_copied():
        assert "this version of transformers has no _apply_weight_conversions_to_state_dict" in capsys.readouterr().out


def test_a_weight_that_cannot_be_merged_fails_as_it_does_by_itself():
    damaged = {name: tensor[:1] if name.endswith("3.up.weight") else tensor for name, tensor in FILES.items()}
    with merged_when_copied(), pytest.raises(RuntimeError, match=r"Failed to apply weight conversion.*gate_up"):
        merging["_apply_weight_conversions_to_state_dict"](Model(), damaged, rules())
