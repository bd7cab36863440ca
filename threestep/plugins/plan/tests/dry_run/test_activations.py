"""Activations counted on the meta device are what a real forward keeps; output layer and cache by hand."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.kept_bytes import kept_bytes
from tests.support.lora_settings import lora_settings
from threestep.plugins.plan.dry_run.activations import cache_bytes, head_bytes, saved_activations
from threestep.plugins.plan.dry_run.meta import model_on_meta
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.models.document_attention import use_document_attention
from training.utils.models.settings import ModelSettings

ROWS, TOKENS = 2, 16
SHAPE = dict(hidden_size=32, num_hidden_layers=5, num_attention_heads=4, vocab_size=64, max_position_embeddings=64)
FAMILIES = {
    "llama": dict(intermediate_size=48, num_key_value_heads=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    "qwen2": dict(intermediate_size=48, num_key_value_heads=4),
    "gemma2": dict(intermediate_size=48, num_key_value_heads=4, head_dim=8, sliding_window=8),
    "gpt2": dict(),
    "openai-gpt": dict(),
}


def built(tmp_path, family: str, **loading) -> torch.nn.Module:
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return model_on_meta(lora_settings(str(tmp_path), **loading), torch.float32)


def kept_by_a_forward(model: torch.nn.Module) -> int:
    """Bytes that a real forward of the body keeps, beside the weights, as the models of a run do."""
    keep_less(model)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    return kept_bytes(model, lambda: model.base_model(input_ids=ids, position_ids=positions, use_cache=False))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "biogpt"])
def test_a_pad_token_and_alibi_can_be_counted(tmp_path, family):
    """GPT-2 looks for the pad token in its ids, which have no values here; BLOOM reads a mask of two dimensions, and
    BioGPT makes one and asks whether it hides anything."""
    config = AutoConfig.for_model(family, **{**SHAPE, "num_hidden_layers": 2}, pad_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = model_on_meta(ModelSettings(str(tmp_path)), torch.float32)
    assert saved_activations(model, ROWS, TOKENS).held(False) > ROWS * TOKENS * SHAPE["hidden_size"] * 4
    assert head_bytes(model, targets=8, positions=ROWS * TOKENS) > 0


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])
def test_it_is_what_a_real_forward_keeps(tmp_path, family):
    on_meta = built(tmp_path, family)
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32).train()
    if family.endswith("gpt") or family == "gpt2":
        real.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, torch.nn.Dropout) else None)
        on_meta.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, torch.nn.Dropout) else None)
    # Without a mask transformers hands SDPA the key-value heads as they are, as other kernels get them always.
    estimated = saved_activations(on_meta, ROWS, TOKENS, attention="flex_attention").held(False)
    assert estimated == pytest.approx(kept_by_a_forward(real), rel=0.05)


def test_attention_in_float32_of_a_bfloat16_model(tmp_path):
    """Short rows on a CPU: queries, keys and values, repeated for their heads, and the output, 4 h numbers a token (the
    output also in bfloat16, for the last matrix); beside bfloat16 alone that is 3 h x 2 + h x 4 bytes more."""
    on_meta = built(tmp_path, "llama").to(torch.bfloat16)
    narrow, wide = (saved_activations(on_meta, ROWS, TOKENS, in_float32=choice) for choice in (False, True))
    assert wide.layers[0] - narrow.layers[0] == (3 * 2 + 4) * 32 * ROWS * TOKENS
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16).train()
    before = kept_by_a_forward(real)
    use_document_attention(real)
    grown = sum(wide.layers) - sum(narrow.layers)
    # Two key-value heads go into the kernel as they are here, not repeated for four query heads: h x 2 bytes less.
    assert kept_by_a_forward(real) - before == grown - 5 * 32 * 2 * ROWS * TOKENS


def test_a_llama_layer_by_hand(tmp_path):
    """Float32, n = 2 x 16 = 32 tokens of width h = 32, intermediate f = 48, 4 heads of 8, 2 key-value heads.

    In numbers a token. A norm: its input (h), 1 / rms (1), and its output (h), which the matrices after it keep (the
    normalized input is computed again); two norms: 4 h + 2. Attention: queries, keys and values, repeated for their
    heads (3 h), the output (h), which the last matrix keeps too, and one number a head (4). The MLP: gate and up: 2 f
    (SiLU of gate, and the product, are computed again). In all 8 h + 2 f + 6 = 256 + 96 + 6 = 358 numbers of 4 bytes.
    """
    counted = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    assert counted.layers == (358 * 32 * 4,) * 5


def test_layers_of_two_kinds_are_both_counted(tmp_path):
    model = built(tmp_path, "gemma2")  # sliding and full attention in turns
    counted = saved_activations(model, ROWS, TOKENS)
    assert len(counted.layers) == 5 and len(model.model.layers) == 5
    assert counted.held(False) > counted.held(True) > 5 * counted.boundary


def test_checkpointing_keeps_inputs_and_one_layer(tmp_path):
    counted = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    assert counted.boundary == ROWS * TOKENS * 32 * 4
    assert counted.held(True) == counted.outside + 5 * counted.boundary + max(counted.layers)


def test_offloaded_inputs_leave_one(tmp_path):
    counted = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    assert counted.held(True) - counted.held(True, offloaded=True) == 4 * counted.boundary


def test_frozen_matrices_keep_less(tmp_path):
    whole = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    lora = built(tmp_path, "llama", lora_dim=2, lora_module_name="q_proj")
    assert {part.device.type for part in lora.parameters()} == {"meta"}
    assert saved_activations(lora, ROWS, TOKENS).held(False) < whole.held(False)


def test_the_output_layer_by_hand(tmp_path):
    model = built(tmp_path, "llama")
    # 10 targets fit one chunk: logits of 10 x 64 in float32, and the gradient of the weight, 64 x 32.
    assert head_bytes(model, 10, 32) == 10 * 64 * 4 + 64 * 32 * 4
    # With entropies, two more arrays of that size.
    assert head_bytes(model, 10, 32, with_entropy=True) == 10 * 64 * 12 + 64 * 32 * 4
    # 2^28 bytes are 2^20 rows of 64 float32 logits: more targets take no more.
    assert head_bytes(model, 2**22, 2**22) == 2**20 * 64 * 4 + 64 * 32 * 4
    assert head_bytes(model, 2**22, 2**22, chunk_mb=1) == 2**12 * 64 * 4 + 64 * 32 * 4
    # Gemma 2 caps its logits after the head: all of them stand, three copies; 10 are read, twice in float32.
    assert head_bytes(built(tmp_path, "gemma2"), 10, 32) == 32 * 64 * 3 * 4 + 10 * 64 * 8


def test_the_cache_by_hand():
    # Llama 2 70B: 80 layers, 8 key-value heads of 128, 2 bytes, keys and values: 327,680 bytes a token.
    llama = AutoConfig.for_model(
        "llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    assert cache_bytes(llama, 3, 100, 2) == 3 * 100 * 327_680
    # Two layers of five see the whole of 16 tokens, three a window of 8: (2 x 16 + 3 x 8) x 2 x 4 heads x 8 x 4 bytes.
    gemma = AutoConfig.for_model("gemma2", **SHAPE, **FAMILIES["gemma2"])
    assert cache_bytes(gemma, 1, 16, 4) == (2 * 16 + 3 * 8) * 2 * 4 * 8 * 4
    assert cache_bytes(gemma, 1, 16, 4, largest_layer=True) == 16 * 2 * 4 * 8 * 4
