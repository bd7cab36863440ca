"""A head under the names of each public form, and back."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import configs
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.head import MtpHead, new_head
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
    with pytest.raises(ThreestepError, match=f"the form of {FORMS[form].families} expects a head .*, got {name}"):
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
