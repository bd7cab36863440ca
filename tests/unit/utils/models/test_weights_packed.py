"""Layers whose weight is kept in another form: they are counted, adapted, saved and described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.engine.zero3 import full_tensors
from training.utils.loading import saving
from training.utils.loading.saving import read_description, write_description
from training.utils.models.flops import model_shape
from training.utils.models.weights import (
    PackedLinear,
    adapters_of,
    adapters_off,
    count_weights,
    packed_elements,
    packed_layers,
)


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


def test_what_is_counted():
    plain, packed = tiny_causal_lm("llama"), doubled(tiny_causal_lm("llama"))
    layers = dict(packed_layers(packed))
    assert len(layers) == 7 * packed.config.num_hidden_layers
    assert (
        packed_elements(packed) == sum(layer.weight.numel() for layer in layers.values()) > 0 == packed_elements(plain)
    )
    assert count_weights(packed) == count_weights(plain)
    mine, theirs = model_shape(packed), model_shape(plain)
    assert mine.body_frozen == packed_elements(packed) and mine.body_trained + mine.body_frozen == theirs.body_trained


def test_adapters_stand_on_them_and_the_merged_model_is_saved():
    model, ids = doubled(tiny_causal_lm("llama")), torch.arange(3, 15)[None]
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
    monkeypatch.setattr(saving, "missing_plugin", lambda table, kind: "they need the plugin 'doubles'")
    with pytest.raises(ThreestepError, match="layers of the model are kept as doubled; they need the plugin 'doubles'"):
        read_description(tmp_path / "model")
