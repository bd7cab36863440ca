"""Operators counted on the meta device, by hand and beside `models.flops`."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.plan.clock.work import Matmul
from threestep.plugins.plan.dry_run import operators
from threestep.plugins.plan.dry_run.operators import training_work
from training.utils.models.flops import model_shape, training_flops

ROWS, TOKENS, TARGETS = 2, 16, 7
SHAPE = dict(hidden_size=32, num_hidden_layers=5, num_attention_heads=4, vocab_size=64, max_position_embeddings=64)
FAMILIES = {
    "llama": dict(intermediate_size=48, num_key_value_heads=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    "gpt_neox": dict(intermediate_size=128),
}


def on_meta(family: str, dtype: torch.dtype = torch.float32, **more) -> torch.nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **more})
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_matmuls_are_those_of_the_formula(family):
    model = on_meta(family)
    work = training_work(model, ROWS, TOKENS, TARGETS)
    counted = sum(part.matmul_flops for part in work)
    assert counted == training_flops(model_shape(model), ROWS * TOKENS, 0, TARGETS)


def test_attention_sees_what_is_before_it():
    """5 layers of width 32: 4 FLOPs forward and 10 backward, for each of 16 x 17 / 2 pairs of two rows."""
    work = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    pairs = ROWS * TOKENS * (TOKENS + 1) / 2
    assert work.forward.attention_flops == 5 * 4 * 32 * pairs
    assert work.backward.attention_flops == 5 * 10 * 32 * pairs


def test_attention_document_by_document_has_more_calls_and_tensors():
    """5 layers, two documents: a second one, and a put-together output forward; backward three gradients, of 32
    numbers a token for queries and 16 for keys and values, whose heads are half as many. Read and written, 4 bytes."""
    work = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    assert (work.forward.apart_launches, work.backward.apart_launches) == (5, 5 * 3)
    assert work.forward.apart_documents == work.backward.apart_documents == 5
    assert work.forward.apart_bytes == 5 * 2 * 4 * ROWS * TOKENS * 32
    assert work.backward.apart_bytes == 5 * 2 * 4 * ROWS * TOKENS * (32 + 16 + 16)


def test_a_cpus_blocks_of_queries_compute_what_is_masked():
    """64 tokens in blocks of 32: the first sees 32 keys and the second 64, 3,072 pairs of which 64 x 65 / 2 count."""
    pairs = ROWS * (32 * 32 + 32 * 64 - 64 * 65 / 2)
    work = training_work(on_meta("llama"), ROWS, 64, TARGETS)
    assert (work.forward.apart_flops, work.backward.apart_flops) == (5 * 4 * 32 * pairs, 5 * 10 * 32 * pairs)


def test_two_layers_stand_for_all(monkeypatch):
    """As if every layer ran, which they do if no two are of one kind."""
    of_two = training_work(on_meta("llama"), ROWS, TOKENS, TARGETS)
    monkeypatch.setattr(operators, "layer_kind", id)
    assert training_work(on_meta("llama"), ROWS, TOKENS, TARGETS) == of_two


def test_frozen_weights_have_no_gradient():
    model = add_lora(on_meta("llama"), Lora(lora_dim=1))
    whole, adapted = (training_work(each, ROWS, TOKENS, TARGETS) for each in (on_meta("llama"), model))
    assert adapted.backward.matmul_flops < 0.75 * whole.backward.matmul_flops
    assert adapted.forward.matmul_flops > whole.forward.matmul_flops


def test_experts_read_the_tokens_that_visit_them():
    model = on_meta("qwen3_moe", torch.bfloat16, num_key_value_heads=2, moe_intermediate_size=16, num_experts=8,
                    num_experts_per_tok=2, head_dim=8)  # fmt: skip
    work = training_work(model, ROWS, TOKENS, TARGETS)
    # 32 tokens visit 2 of 8 experts, 8 each: gate and up together are 32 columns, down has 16 rows of weights.
    assert work.forward.matmuls[Matmul(8, 8, 32, 32)] == 5 and work.forward.matmuls[Matmul(8, 8, 32, 16)] == 5
    assert work.backward.matmul_flops == pytest.approx(2 * work.forward.matmul_flops)


def test_a_compiler_moves_less_and_a_reward_model_has_no_output_layer():
    model = on_meta("llama")
    forward = training_work(model, ROWS, TOKENS, TARGETS).forward
    assert 0 < forward.fused_bytes < forward.moved_bytes / 2
    model.get_output_embeddings = lambda: None
    assert training_work(model, ROWS, TOKENS, TARGETS).head.matmul_flops == 0
