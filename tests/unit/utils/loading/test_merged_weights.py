"""Merged weights are made when they are copied, as transformers makes them; where that cannot be, the log says so."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.integrations import deepspeed as sharding

from training.utils.loading.merged_weights import MergedWeight, merged_when_copied

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


def test_rules_that_read_values_are_followed_at_once_and_named(capsys):
    with merged_when_copied():
        at_once = converted(rules(ReadsValues))
    assert all(torch.equal(at_once[name], weight) for name, weight in converted(rules()).items())
    said = capsys.readouterr().out
    assert "are merged on every rank at once" in said and "(Model: RuntimeError: " in said
    with merged_when_copied():
        converted(rules())
    assert not capsys.readouterr().out


def test_a_transformers_without_the_function_is_named(capsys, monkeypatch):
    monkeypatch.delattr(sharding, "_apply_weight_conversions_to_state_dict")
    with merged_when_copied():
        assert "this transformers has no _apply_weight_conversions_to_state_dict" in capsys.readouterr().out


def test_a_weight_that_cannot_be_merged_fails_as_it_does_by_itself():
    damaged = {name: tensor[:1] if name.endswith("3.up.weight") else tensor for name, tensor in FILES.items()}
    with merged_when_copied(), pytest.raises(RuntimeError, match=r"Failed to apply weight conversion.*gate_up"):
        merging["_apply_weight_conversions_to_state_dict"](Model(), damaged, rules())
