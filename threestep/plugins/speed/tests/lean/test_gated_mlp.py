"""Gated MLPs that keep less: the same gradients to the bit, of less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.lora_settings import with_lora
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.plan.dry_run.activations import SavedTensors
from threestep.plugins.speed.lean.forwards import keep_less
from threestep.plugins.speed.lean.gated_mlp import lean_mlp


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    model.zero_grad()
    return found


def saved_bytes(model: Any, ids: torch.Tensor) -> int:
    counting = SavedTensors({part.untyped_storage()._cdata for part in model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(counting, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return counting.bytes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [0, 2])
def test_gradients_are_those_of_the_plain_mlp(dtype, lora):
    torch.manual_seed(1)
    model = with_lora(tiny_causal_lm("llama"), lora).to(dtype)
    ids = torch.arange(24).view(2, 12)
    plain, bytes_before = gradients(model, ids), saved_bytes(model, ids)
    config = model.config
    assert keep_less(model, [lean_mlp]) == config.num_hidden_layers and keep_less(model, [lean_mlp]) == 0
    again = gradients(model, ids)
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)
    two = 2 * ids.numel() * config.intermediate_size * dtype.itemsize * config.num_hidden_layers
    spared = bytes_before - saved_bytes(model, ids)
    assert spared == two if not lora else spared >= two


def test_nothing_is_kept_where_nothing_learns():
    model = tiny_causal_lm("llama")
    keep_less(model, [lean_mlp])
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, tiny_causal_lm("llama")(input_ids=ids).logits)


def test_an_mlp_of_another_form_is_left_alone():
    assert keep_less(tiny_causal_lm("gpt2"), [lean_mlp]) == 0
