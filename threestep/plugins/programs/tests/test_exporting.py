"""Weights of a checkpoint that are not those of its model are not exported, and the others as they were trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.families.builds import build
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.programs import exporting as export
from training.utils.base.errors import ThreestepError
from training.utils.loading.saving import write_description

CASES = [
    ("llama", "model.norm.weight"),
    ("llama", "lm_head.weight"),  # not tied here, though the family can tie it
    ("gpt2", "transformer.h.1.ln_1.bias"),
]


@pytest.fixture
def exported(tmp_path, tiny_tokenizer, monkeypatch):
    """Export a checkpoint of `model` whose weights are `weights`; return the folder."""

    def export_of(model, weights, **more):
        write_description(tmp_path / "models" / "model", model, tiny_tokenizer)
        state = {f"model.{name}": weight for name, weight in weights.items()}
        monkeypatch.setattr(export, "engine_state", lambda path: state)
        export.export_model(tmp_path, "model", tmp_path / "out", **more)
        return tmp_path / "out"

    return export_of


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_weight_that_is_lacking(exported, tiny_tokenizer, family, name):
    model = tiny_causal_lm(family, vocab_size=len(tiny_tokenizer))
    weights = {key: weight for key, weight in model.state_dict().items() if key != name}
    with pytest.raises(ThreestepError, match=f"lacks 1 weights of its model, such as {name}: .* the run's versions"):
        exported(model, weights)


def test_a_weight_that_nobody_knows(exported, tiny_tokenizer):
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer))
    weights = {**model.state_dict(), "model.layers.0.mlp.up_proj.bias": torch.zeros(48)}
    with pytest.raises(ThreestepError, match="has 1 weights that its model does not know, such as .*up_proj.bias: the"):
        exported(model, weights)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_weights_are_exported_tied_ones_once(exported, tiny_tokenizer, family):
    model = tiny_causal_lm(family, vocab_size=len(tiny_tokenizer))
    weights = dict(model.state_dict())
    if family == "gpt2":
        weights.pop("lm_head.weight")
    folder = exported(model, weights)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(folder)(ids).logits, model(ids).logits)


def test_a_buffer_that_is_saved_keeps_its_precision(exported, tiny_tokenizer, tmp_path):
    """The bias of a router, float32 in a bfloat16 model; ZeRO-3's checkpoints hold all in float32."""
    build("glm4_moe", tmp_path / "start", vocab_size=len(tiny_tokenizer))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16)
    folder = exported(model, {name: tensor.float() for name, tensor in model.state_dict().items()})
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    stored = load_file(folder / "model.safetensors")
    kept = {str(tensor.dtype) for name, tensor in stored.items() if "correction_bias" in name}
    assert kept == {"torch.float32"} and stored["model.norm.weight"].dtype is torch.bfloat16


def test_what_was_trained_beside_a_model_is_written_beside_it(exported, tiny_tokenizer, tmp_path):
    model, written = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer)), list[str]()

    def write(checkpoint, name, state, dtype, *, out):
        assert checkpoint == tmp_path and name == "model" and dtype is torch.float32 and "model.lm_head.weight" in state
        assert (out / "model.safetensors").is_file()
        written.append("written")

    exported(model, dict(model.state_dict()), write_beside=[write, write])
    assert written == ["written", "written"]
