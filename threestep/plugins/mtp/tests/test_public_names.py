"""A head under the names of each public form and in the files of checkpoints; and transformers beside ours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from tests.families import configs
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp.head import MtpHead, new_head
from threestep.plugins.mtp.public_folder import public_head_in
from threestep.plugins.mtp.public_names import (
    FORMS,
    after_the_norm,
    before_the_norm,
    depths_of,
    form_of,
    from_public,
    to_public,
)
from training.utils.base.errors import ThreestepError

LAYERS = 2
# Of each form a family whose heads have it, or whose block is of that shape, and a number of modules.
CASES = [
    ("deepseek", "deepseek_v3", 2),  # experts
    ("deepseek", "glm4_moe", 1),
    ("qwen", "qwen3", 1),
    ("mimo", "qwen2", 2),
    ("ernie", "llama", 1),
]


def model_of(family):
    if family in ("llama", "qwen3"):
        return tiny_causal_lm(family)
    config = configs.tiny_config(family)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 1  # as the checkpoints: the last layer has experts
    return AutoModelForCausalLM.from_config(config).eval()


def drawn_head(model, form, depths, seed=1) -> MtpHead:
    """A head with random weights; as the form has it, with or without a final norm."""
    head = new_head(model, depths, seed, final_norm=FORMS[form].names.final_norm is not None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.state_dict().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.dim() == 1))
    return head


@pytest.mark.parametrize(("form", "family", "depths"), CASES)
def test_there_and_back_to_the_bit(form, family, depths):
    state = drawn_head(model_of(family), form, depths).state_dict()
    public = to_public(FORMS[form], state, LAYERS)
    assert form_of(public, LAYERS) is FORMS[form] and depths_of(FORMS[form], public, LAYERS) == depths
    # As a checkpoint has them, the model's layers stand before them, and copies of its embeddings among them.
    others = {"model.layers.1.input_layernorm.weight": torch.ones(3), "lm_head.weight": torch.ones(3)}
    copies = {name.format(n=LAYERS): torch.ones(3) for name in FORMS[form].copies}
    back = from_public(FORMS[form], {**public, **others, **copies}, LAYERS, depths)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    again = to_public(FORMS[form], back, LAYERS)
    assert again.keys() == public.keys() and all(torch.equal(again[name], public[name]) for name in public)


def test_the_names_are_those_of_the_checkpoints():
    """One name of each part, as the indices on the hub have them."""
    names = {
        "deepseek": "model.layers.2.enorm.weight model.layers.2.shared_head.norm.weight "
        "model.layers.2.mlp.experts.1.up_proj.weight model.layers.3.eh_proj.weight",
        "qwen": "mtp.fc.weight mtp.pre_fc_norm_embedding.weight mtp.pre_fc_norm_hidden.weight mtp.norm.weight "
        "mtp.layers.0.self_attn.q_norm.weight",
        "mimo": "model.mtp_layers.0.token_layernorm.weight model.mtp_layers.0.hidden_layernorm.weight "
        "model.mtp_layers.1.input_proj.weight model.mtp_layers.0.final_layernorm.weight "
        "model.mtp_layers.0.self_attn.q_proj.bias",
        "ernie": "model.mtp_emb_norm.0.weight model.mtp_hidden_norm.0.weight model.mtp_linear_proj.0.weight "
        "model.mtp_block.0.mlp.down_proj.weight",
    }
    for form, family, depths in CASES:
        public = to_public(FORMS[form], drawn_head(model_of(family), form, depths).state_dict(), LAYERS)
        if family != "glm4_moe":
            assert set(names[form].split()) <= public.keys(), form


def test_mimos_projection_reads_the_state_first():
    """Hidden size 2: columns 0 and 1 of ours read the embedding, and its columns 2 and 3 do."""
    state = {"depths.0.eh_proj.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]])}
    public = to_public(FORMS["mimo"], state, LAYERS)
    assert public["model.mtp_layers.0.input_proj.weight"].tolist() == [[3.0, 4.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("form", "name"),
    [("ernie", "depths.0.trunk.norm.weight"), ("qwen", "depths.1.enorm.weight"), ("mimo", "depths.0.trunk.wpe.weight")],
)
def test_a_part_that_the_form_does_not_have(form, name):
    with pytest.raises(ThreestepError, match=f"a head for {FORMS[form].families} needs .*, got {name}"):
        to_public(FORMS[form], {name: torch.ones(1)}, LAYERS)


def test_a_plain_checkpoint_has_none():
    assert form_of(tiny_causal_lm("llama").state_dict(), LAYERS) is None


def test_a_head_that_reads_states_before_the_norm_there_and_back():
    """By hand: w = (3, 4, 0, 0), whose root mean square is 2.5; where w is 0 there is no state to read after it."""
    norm_H = torch.tensor([3.0, 4.0, 0.0, 0.0])
    ours = {"depths.0.hnorm.weight": torch.tensor([1.0, 2.0, 0.0, 0.0]), "depths.1.hnorm.weight": torch.ones(4)}
    before = before_the_norm(ours, norm_H)
    torch.testing.assert_close(before["depths.0.hnorm.weight"], torch.tensor([1.2, 3.2, 0.0, 0.0]))
    back = after_the_norm(FORMS["mimo"], before, norm_H, 2)
    assert back.keys() == ours.keys() and all(torch.allclose(back[name], ours[name]) for name in ours)
    # ERNIE's ends in the model's norm, and so does each state that a further module reads.
    ernie = after_the_norm(FORMS["ernie"], before, norm_H, 2)
    assert torch.equal(ernie["depths.1.trunk.norm.weight"], norm_H)
    torch.testing.assert_close(ernie["depths.1.hnorm.weight"], torch.tensor([2.5 / 3, 2.5 / 4, 0.0, 0.0]))


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
        (
            {MIMO + "mlp.up_proj.weight": None},
            True,
            r"up_proj.weight, expected \[\d+, \d+\], got nothing; .* checkpoint",
        ),
        ({MIMO + "mlp.up_proj.scale": torch.ones(2)}, True, r"mlp.up_proj.scale, expected nothing, got \[2\]"),
        ({MIMO + "hidden_layernorm.weight": torch.ones(7)}, True, r"hnorm.weight, expected \[\d+\], got \[7\]"),
        ({}, False, r"trunk.norm.weight, expected nothing, got \[\d+\]; .*: set --mtp_final_norm true"),
    ],
)
def test_a_head_of_other_tensors_is_refused(changes, final_norm, said, tmp_path):
    model = model_of("qwen2")
    checkpoint(tmp_path, model, "mimo", drawn_head(model, "mimo", 1), changes)
    found = public_head_in(str(tmp_path), model.config.num_hidden_layers)
    with pytest.raises(ThreestepError, match=rf"model.mtp_layers.0.\* \(the names of MiMo-7B\)': for .*{said}"):
        found.read(new_head(model, 1, seed=2, final_norm=final_norm))


def test_a_head_that_reads_states_before_the_models_norm_needs_that_norm(tmp_path):
    model = tiny_causal_lm("llama")
    checkpoint(tmp_path, model, "ernie", drawn_head(model, "ernie", 1))
    found = public_head_in(str(tmp_path), 2)
    alone = {name: tensor for name, tensor in found.tensors.items() if name != "model.norm.weight"}
    with pytest.raises(ThreestepError, match="heads of ERNIE-4.5 use .* requires model.norm.weight in the same files"):
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
