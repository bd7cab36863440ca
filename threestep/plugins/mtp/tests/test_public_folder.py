"""Heads in the files of checkpoints under public names, made on the spot; and transformers' own module beside ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.public_folder import public_head_in
from threestep.plugins.mtp.public_names import FORMS, to_public
from threestep.plugins.mtp.tests.test_public_names import CASES, drawn_head, model_of
from training.utils.base.errors import ThreestepError


def checkpoint(folder, model, form, head, changes=None):
    """Write `model` with `head` in two files and an index, as public checkpoints come."""
    layers = model.config.num_hidden_layers
    model.save_pretrained(folder)
    public = to_public(FORMS[form], head.state_dict(), layers) | (changes or {})
    public = {name: tensor.contiguous() for name, tensor in public.items() if tensor is not None}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file(public, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    weight_map = {
        name: f"model-0000{number}-of-00002.safetensors"
        for number in (1, 2)
        for name in load_file(folder / f"model-0000{number}-of-00002.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return public


@pytest.mark.parametrize(("form", "family", "depths"), CASES)
def test_a_head_is_read_as_it_was_written(form, family, depths, tmp_path):
    model = model_of(family)
    head = drawn_head(model, form, depths)
    checkpoint(tmp_path, model, form, head)
    found = public_head_in(str(tmp_path), model.config.num_hidden_layers)
    assert found.depths == depths and found.form is FORMS[form]
    other = drawn_head(model, form, depths, seed=2)
    found.read(other)
    wanted = head.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())


def test_no_head_and_no_folder(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    assert public_head_in(str(tmp_path), 2) is None
    assert public_head_in("a-name/on-a-hub", 2) is None


MIMO = "model.mtp_layers.0."


@pytest.mark.parametrize(
    ("changes", "final_norm", "said"),
    [
        ({MIMO + "mlp.up_proj.weight": None}, True, r"up_proj.weight of \[\d+, \d+\], got nothing; .* checkpoint"),
        ({MIMO + "mlp.up_proj.scale": torch.ones(2)}, True, r"mlp.up_proj.scale of nothing, got \[2\]"),
        ({MIMO + "hidden_layernorm.weight": torch.ones(7)}, True, r"hnorm.weight of \[\d+\], got \[7\]"),
        ({}, False, r"trunk.norm.weight of nothing, got \[\d+\]; .*: give --mtp_final_norm true"),
    ],
)
def test_a_head_of_other_tensors_is_refused(changes, final_norm, said, tmp_path):
    model = model_of("qwen2")
    checkpoint(tmp_path, model, "mimo", drawn_head(model, "mimo", 1), changes)
    found = public_head_in(str(tmp_path), model.config.num_hidden_layers)
    with pytest.raises(ThreestepError, match=rf"model.mtp_layers.0.\* \(the names of MiMo-7B\)': expected .*{said}"):
        found.read(new_head(model, 1, seed=2, final_norm=final_norm))


def test_a_head_that_reads_states_before_the_models_norm_needs_that_norm(tmp_path):
    model = tiny_causal_lm("llama")
    checkpoint(tmp_path, model, "ernie", drawn_head(model, "ernie", 1))
    found = public_head_in(str(tmp_path), 2)
    alone = {name: tensor for name, tensor in found.tensors.items() if name != "model.norm.weight"}
    with pytest.raises(ThreestepError, match="heads of ERNIE-4.5 read .* expected model.norm.weight in the same files"):
        replace(found, tensors=alone).read(new_head(model, 1, seed=2))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_what_we_write_and_computes_the_same(family, tmp_path):
    """`MtpModel` reads the checkpoint by its own rules."""
    made = model_of(family)
    head = drawn_head(made, "deepseek", 1)
    checkpoint(tmp_path, made, "deepseek", head)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    model.config.num_mtp_layers = 1
    if getattr(model.config, "mlp_layer_types", None) is not None:
        model.config.mtp_mlp_layer_types = ["sparse"]
    theirs = MtpModel.from_pretrained(model).eval()
    ids_1T = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_1TH, embeddings_1TH = model.model(ids_1T)[0], model.get_input_embeddings()(ids_1T)
        joined = embeddings_1TH[:, 1:], hidden_1TH[:, :-1]
        positions = torch.arange(1, 12).unsqueeze(0)
        mask = create_causal_mask(theirs.config, joined[0], None, None, positions)
        rotary = model.model.rotary_emb(joined[0], position_ids=positions)
        expected = theirs.layers[0](*joined, rotary, mask, positions, None)
        module = head.depths[0]
        ours = module.eh_proj(torch.cat([module.enorm(joined[0]), module.hnorm(joined[1])], dim=-1))
        got = module.trunk(inputs_embeds=ours, position_ids=positions, use_cache=False)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
