"""Heads under public names equal each family's reference, in plain PyTorch from the tensors of a folder.

State i, of the token at i, and the embedding of token i + 1 predict token i + 2. Which state a head reads, and in what
its block ends, by family:

DeepSeek-V3, GLM-4.5 (vLLM deepseek_mtp.py, glm4_moe_mtp.py; SGLang deepseek_nextn.py), Qwen3-Next (vLLM
    qwen3_next_mtp.py): the state after the model's final norm; columns [embedding; state]; a norm of the head's own.
MiMo-7B (vLLM mimo.py, mimo_mtp.py): the state before the final norm; columns [state; embedding]; a norm of its own.
ERNIE-4.5 (PaddleFormers ernie4_5_moe/modeling.py, which trained it): the state before the final norm; columns
    [embedding; state]; the model's final norm. vLLM (ernie_mtp.py) runs it on the state after the norm, and in none.

T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import configs
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.public_folder import public_head_in
from threestep.plugins.mtp.tests.test_public_names import checkpoint, drawn_head

LAYERS, LENGTH = 2, 24
FAMILY = {"deepseek": "llama", "qwen": "qwen3", "mimo": "qwen2", "ernie": "llama"}
QWEN2 = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN2 |= {"num_key_value_heads": 1, "max_position_embeddings": 128}
# By form: (embedding's norm, state's norm, projection, block, norm at the end)
NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "", "final_layernorm"),
    "ernie": ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", "mtp_block.0.", None),
}
PREFIX = {"deepseek": f"model.layers.{LAYERS}.", "qwen": "mtp.", "mimo": "model.mtp_layers.0.", "ernie": "model."}


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x_THd: torch.Tensor, theta: float) -> torch.Tensor:
    length, _, size = x_THd.shape
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos + torch.cat([-second, first], -1) * sin


def block(weights: dict[str, torch.Tensor], x_TH: torch.Tensor, config: Any) -> torch.Tensor:
    """A layer of Llama, with Qwen2's biases or Qwen3's norms of queries and keys where the weights have them."""
    eps, heads, shared = config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads

    def attended(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            functional.linear(x, weights[f"self_attn.{n}_proj.weight"], weights.get(f"self_attn.{n}_proj.bias"))
            for n in "qkv"
        )
        q, k, v = (part.unflatten(-1, (count, -1)) for part, count in ((q, heads), (k, shared), (v, shared)))
        if "self_attn.q_norm.weight" in weights:
            q, k = (
                normed(q, weights["self_attn.q_norm.weight"], eps),
                normed(k, weights["self_attn.k_norm.weight"], eps),
            )
        theta = config.rope_parameters["rope_theta"]
        q, k = rotated(q, theta), rotated(k, theta)
        k, v = (part.repeat_interleave(heads // shared, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ weights["self_attn.o_proj.weight"].T

    x_TH = x_TH + attended(normed(x_TH, weights["input_layernorm.weight"], eps))
    inner = normed(x_TH, weights["post_attention_layernorm.weight"], eps)
    gated = functional.silu(inner @ weights["mlp.gate_proj.weight"].T) * (inner @ weights["mlp.up_proj.weight"].T)
    return x_TH + gated @ weights["mlp.down_proj.weight"].T


def states_of(model: Any, ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before and after the model's final norm, [T, H]."""
    caught = {}
    hook = model.model.norm.register_forward_hook(lambda _, inputs, output: caught.update(b=inputs[0], a=output))
    model(ids_T.unsqueeze(0))
    hook.remove()
    return caught["b"][0], caught["a"][0]


def reference(form: str, folder: Any, model: Any, ids_T: torch.Tensor, factor_T: Any = 1.0, by_vllm: bool = False):
    """Log-probabilities of token i + 2, [T - 1, V]. factor_T: of the state's part. by_vllm: as vLLM runs ERNIE's."""
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= {name: tensor.double() for name, tensor in load_file(file).items()}
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    enorm, hnorm, projection, inner, last = NAMES[form]
    own = {name.removeprefix(PREFIX[form]): tensor for name, tensor in stored.items() if name.startswith(PREFIX[form])}
    weights = {name.removeprefix(inner): tensor for name, tensor in own.items() if name.startswith(inner)}
    eps = model.config.rms_norm_eps
    before_TH, after_TH = (state.double() for state in states_of(model, ids_T))
    state_TH = before_TH if form in ("mimo", "ernie") and not by_vllm else after_TH
    embedding = normed(stored["model.embed_tokens.weight"][ids_T[1:]], own[f"{enorm}.weight"], eps)
    state = normed(state_TH[:-1], own[f"{hnorm}.weight"], eps) * factor_T
    halves = (state, embedding) if form == "mimo" else (embedding, state)
    out_TH = block(weights, torch.cat(halves, -1) @ own[f"{projection}.weight"].T, model.config)
    if last is not None:
        out_TH = normed(out_TH, own[f"{last}.weight"], eps)
    elif not by_vllm:
        out_TH = normed(out_TH, stored["model.norm.weight"], eps)
    return (out_TH @ stored["lm_head.weight"].T).log_softmax(-1)


def made(form: str, folder: Any) -> Any:
    """A published model with its head, written to `folder`; its final norm is far from all ones."""
    if form == "mimo":
        torch.manual_seed(0)
        own = {**QWEN2, "vocab_size": VOCABULARY, "initializer_range": 0.3}
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **own)).eval()
    else:
        model = tiny_causal_lm(FAMILY[form])
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(3)) * 3 + 0.2)
    checkpoint(folder, model, form, drawn_head(model, form, 1))
    return model


def ours(folder: Any, model: Any, ids_T: torch.Tensor, final_norm: bool = True) -> torch.Tensor:
    head = new_head(model, 1, seed=4, final_norm=final_norm)
    found = public_head_in(str(folder), LAYERS)
    assert found is not None
    found.read(head)
    module: Any = head.double().depths[0]
    model = model.double()
    _, after_TH = states_of(model, ids_T)
    joined = module.joined(model.get_input_embeddings()(ids_T[1:]), after_TH[:-1])
    out_1TH = module.trunk(inputs_embeds=joined.unsqueeze(0), use_cache=False)[0]
    return model.lm_head(out_1TH[0]).log_softmax(-1)


@pytest.mark.parametrize("form", list(NAMES))
@torch.no_grad()
def test_a_published_head_computes_what_its_family_does(form, tmp_path):
    model = made(form, tmp_path).double()
    ids_T = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    got, factor_T = ours(tmp_path, model, ids_T), 1.0
    if form in ("mimo", "ernie"):  # a state is normed twice: what is left of it is one factor for each token
        before_TH, after_TH = states_of(model, ids_T)
        weight_H, eps = model.model.norm.weight, model.config.rms_norm_eps
        factor_T = weight_H.square().mean().sqrt() / (after_TH[:-1].square().mean(-1, keepdim=True) + eps).sqrt()
        assert 0.7 < factor_T.min() < 0.95 < factor_T.max() < 1.6, factor_T
        accepted = torch.minimum(got.exp(), reference(form, tmp_path, model, ids_T).exp()).sum(-1).mean()
        assert accepted > 0.85, accepted  # the share of drafts that would be kept; 0.3 where the norm is not undone
    torch.testing.assert_close(got, reference(form, tmp_path, model, ids_T, factor_T), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_ernies_head_without_a_norm_at_its_end_is_what_vllm_runs(tmp_path):
    model = made("ernie", tmp_path).double()
    ids_T = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = reference("ernie", tmp_path, model, ids_T, by_vllm=True)
    torch.testing.assert_close(ours(tmp_path, model, ids_T, final_norm=False), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@torch.no_grad()
def test_qwens_norms_multiply_by_one_and_their_weights(family, tmp_path):
    model: Any = AutoModelForCausalLM.from_config(configs.tiny_config(family)).eval()
    stored = checkpoint(tmp_path, model, "qwen", drawn_head(model, "qwen", 1))
    head = new_head(model, 1, seed=4)
    public_head_in(str(tmp_path), model.config.num_hidden_layers).read(head)
    embedding, state = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    parts = ("embedding", embedding), ("hidden", state)
    joined = torch.cat([normed(x, 1 + stored[f"mtp.pre_fc_norm_{name}.weight"], 1e-6) for name, x in parts], -1)
    torch.testing.assert_close(head.depths[0].joined(embedding, state), joined @ stored["mtp.fc.weight"].T)
    expected = normed(state, 1 + stored["mtp.norm.weight"], 1e-6)
    torch.testing.assert_close(head.depths[0].trunk.norm(state), expected)
