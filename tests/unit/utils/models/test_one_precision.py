"""Weights that a family keeps in float32 are rounded as DeepSpeed would, and the log says so."""

from __future__ import annotations

import torch

from tests.families.builds import build
from tests.families.reading import load
from training.utils.models.one_precision import ROUNDED, to_one_precision
from training.utils.models.own_forward import current_difference, own_forward_of


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
        "DeepSpeed rounds 2 weights that its family keeps in float32 to bfloat16 (model.layers.*.mlp.gate.wg.weight): "
        "its log-probabilities move by "
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
        "DeepSpeed rounds 3 weights that its family keeps in float32 to bfloat16 ("
        "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias, model.layers.*.mlp.gate.weight, "
        "model.norm.weight); --dtype fp32 keeps them"
    )
