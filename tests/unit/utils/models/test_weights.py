"""Weights of a file start where torch's own do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from tests.families.builds import build
from tests.families.reading import load
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.engine.zero3 import full_tensors
from training.utils.loading import saving
from training.utils.loading.saving import read_description, write_description
from training.utils.models.flops import model_shape
from training.utils.models.one_precision import ROUNDED, to_one_precision
from training.utils.models.own_forward import current_difference, own_forward_of
from training.utils.models.weights import (
    PackedLinear,
    adapters_of,
    adapters_off,
    align_weights,
    buffers_kept,
    count_weights,
    packed_elements,
    packed_layers,
)


def test_weights_that_start_elsewhere_are_moved_and_no_others():
    """A weight at the second number of a line; what torch allocated stays where it is."""
    model = torch.nn.Linear(16, 3)
    own = model.bias.data_ptr()
    model.weight.data = torch.arange(49.0)[1:].view(3, 16)
    assert align_weights(model) == 1
    assert model.weight.data_ptr() % 64 == 0 and model.bias.data_ptr() == own
    assert torch.equal(model.weight, torch.arange(1.0, 49.0).view(3, 16))
    assert align_weights(model) == 0


def test_weights_that_share_memory_go_on_sharing_it():
    model = torch.nn.ModuleList(torch.nn.Linear(16, 3, bias=False) for _ in range(2))
    model[0].weight.data = torch.zeros(49)[1:].view(3, 16)
    model[1].weight.data = model[0].weight.data
    assert align_weights(model) == 0
    model[0].weight.data += 1
    assert torch.equal(model[1].weight, torch.ones(3, 16))


@pytest.mark.parametrize("ties", [False, True])
def test_a_loaded_models_weights_are_aligned(tmp_path, ties):
    """A header of any length puts them off the lines; tied ones stay tied."""
    from training.utils.loading.models import load_causal_lm
    from training.utils.models.settings import ModelSettings

    tiny = tiny_causal_lm("llama", tie_word_embeddings=ties)
    tiny.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    for note in ("", "x" * 8, "x" * 16):  # the header is padded to 8 bytes
        save_file(load_file(file), file, metadata={"format": "pt", "note": note})
        model = load_causal_lm(ModelSettings(str(tmp_path)), torch.float32, tiny.config.vocab_size)
        assert {weight.data_ptr() % 64 for weight in model.parameters()} == {0}
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == ties
        for (name, weight), other in zip(model.named_parameters(), tiny.parameters(), strict=True):
            assert torch.equal(weight, other), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cast_module_keeps_its_buffers(family):
    """As DeepSpeed 0.19.0 casts the module that it takes."""
    model = tiny_causal_lm(family)
    were = copy.deepcopy(dict(model.named_buffers()))
    with buffers_kept(model):
        model.bfloat16()
    assert model.dtype is torch.bfloat16
    for name, buffer in model.named_buffers():
        assert buffer.dtype is were[name].dtype and torch.equal(buffer, were[name]), name
    assert sum("inv_freq" in name for name in were) >= 2


class Doubled(PackedLinear):
    """Keeps half the weight."""

    kind = "doubled"

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.weight.shape
        self.bias, self.dtype, self.transposed, self.absent = layer.bias, layer.weight.dtype, False, None
        self.register_buffer("part", layer.weight.detach() / 2)

    @property
    def form(self) -> str:
        return "halves"

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.get_buffer("part") * 2).to(dtype)

    def described(self, names: list[str]) -> dict[str, Any]:
        return {"factor": 2, self.kind: names}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.whole(input.dtype), self.bias)


def double(model: Any, facts: Mapping[str, Any]) -> None:
    for name in facts["doubled"]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, Doubled(model.get_submodule(name)))


def doubled(model: Any) -> Any:
    names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    double(model, {"doubled": names})
    return model


def test_they_are_counted_adapters_stand_on_them_and_the_merged_model_is_saved():
    model, ids = doubled(tiny_causal_lm("llama")), torch.arange(3, 15)[None]
    whole, layers = tiny_causal_lm("llama"), dict(packed_layers(model))
    assert len(layers) == 7 * model.config.num_hidden_layers and count_weights(model) == count_weights(whole)
    assert packed_elements(model) == sum(each.weight.numel() for each in layers.values()) > packed_elements(whole) == 0
    mine, theirs = model_shape(model), model_shape(whole)
    assert mine.body_frozen == packed_elements(model) and mine.body_trained + mine.body_frozen == theirs.body_trained
    model = add_lora(model, Lora(lora_dim=2)).eval()
    assert not adapters_of(model).train_alone(model)  # an engine that adds adapters to a base has no such base
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.fill_(0.1)
        for merged in (True, False):
            plain = tiny_causal_lm("llama")
            plain.load_state_dict({name: each.clone() for name, each in full_tensors(model, 0, merged)})
            if merged:
                computed = model(ids).logits
            else:
                with adapters_off(model):
                    computed = model(ids).logits
            torch.testing.assert_close(plain(ids).logits, computed, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_says_which_they_are(tmp_path, tiny_tokenizer, monkeypatch):
    model = doubled(tiny_causal_lm("llama"))
    write_description(tmp_path / "model", model, tiny_tokenizer)
    places = {"doubled": f"{__name__}:double"}
    monkeypatch.setattr(saving, "added", lambda table, known: {"packed_layers": places}.get(table, {}))
    read = read_description(tmp_path / "model").model
    assert [name for name, _ in packed_layers(read)] == [name for name, _ in packed_layers(model)]
    monkeypatch.setattr(saving, "missing", lambda table: {"doubled": "doubles"})
    monkeypatch.setattr(saving, "missing_plugin", lambda table, kind: "this needs the plugin 'doubles'")
    with pytest.raises(
        ThreestepError, match="layers of the model are stored as doubled; this needs the plugin 'doubles'"
    ):
        read_description(tmp_path / "model")


def test_they_are_rounded_measured_again_and_named(tmp_path):
    build("hunyuan_v1_moe", tmp_path)
    model = load(tmp_path, torch.bfloat16)
    kept = [name for name, weight in model.named_parameters() if weight.dtype is torch.float32]
    assert kept == [f"model.layers.{layer}.mlp.gate.wg.weight" for layer in range(2)]
    before = own_forward_of(model)
    to_one_precision(model, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    after = own_forward_of(model)
    assert current_difference(model, after) <= current_difference(model, before)
    [note] = after.notes
    assert note.startswith(
        "DeepSpeed rounds 2 weights that the model family keeps in float32 to bfloat16 "
        "(model.layers.*.mlp.gate.wg.weight): its log-probabilities move by "
    )
    assert note.endswith("; --dtype fp32 keeps them")
    to_one_precision(model, torch.bfloat16)
    assert own_forward_of(model).notes == [note]


def test_shards_were_rounded_when_they_were_made(tmp_path):
    """Which of them, zero.Init marks; those that a family lists are known by their names."""
    build("ernie4_5_moe", tmp_path)
    model = load(tmp_path, torch.bfloat16)
    for weight in model.parameters():
        weight.data, weight.ds_id = weight.data.to(torch.bfloat16), 0
    setattr(model.model.norm.weight, ROUNDED, True)
    to_one_precision(model, torch.bfloat16)
    [note] = own_forward_of(model).notes
    assert note == (
        "DeepSpeed rounds 3 weights that the model family keeps in float32 to bfloat16 ("
        "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias, model.layers.*.mlp.gate.weight, "
        "model.norm.weight); --dtype fp32 keeps them"
    )
