"""What a step is worth in FLOPs: by hand, against the models' own parameters, and against torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt, unshared
from training.utils.layout.rows import packed_rows
from training.utils.models.flops import ComputeMeter, ModelShape, model_shape, training_flops, visible_pairs
from training.utils.models.token_model import PolicyModel


def run(length: int, first_target: int = 99) -> TokenSequence:
    return TokenSequence(torch.arange(1, length + 1), torch.arange(length) >= first_target)


SHAPE = ModelShape(body_trained=128, body_frozen=0, head_trained=40, head_frozen=0, attention_width=4)


def test_a_step_by_hand():
    """The docstring's example; then all weights frozen: 4 a weight instead of 6."""
    assert training_flops(SHAPE, tokens=3, pairs=6, reads=1) == 2304 + 288 + 240
    frozen = ModelShape(0, 128, 0, 40, 4)
    assert training_flops(frozen, tokens=3, pairs=6, reads=1) == 4 * 128 * 3 + 288 + 4 * 40


def test_a_meter_counts_documents():
    # Two sequences of 3 tokens with a target each: 2 x 2832.
    meter = ComputeMeter(SHAPE, peak_flops_per_second=113_280)
    assert meter.flops([plain(run(3, 2)), plain(run(3, 2))], reads=2) == 2 * 2832


def test_pairs_that_see_each_other_by_hand():
    assert visible_pairs(plain(run(1))) == 1
    assert visible_pairs(plain(run(5))) == 15
    shared = shared_prompt(run(3), [run(2), run(1)])
    assert visible_pairs(shared) == 19
    # Unshared, the prompt is computed twice: 5 x 6 / 2 and 4 x 5 / 2.
    assert sum(visible_pairs(alone) for alone in unshared(shared)) == 15 + 10


@pytest.mark.parametrize(
    "documents", [[plain(run(5)), plain(run(2))], [shared_prompt(run(4), [run(2), run(3), run(1)])]]
)
def test_pairs_are_those_of_the_mask(documents: list[Document]):
    mask = packed_rows([documents], 0).dense_mask()
    assert sum(visible_pairs(document) for document in documents) == int(mask.sum())


# Per layer of these shapes (hidden 32, MLP 48): Llama has two heads of 16 and one of keys and values (2 matrices of
# 32 x 32, 2 of 32 x 16) and a gated MLP (3 of 32 x 48); GPT-2 has 32 x 96, 32 x 32 and 2 of 32 x 128; OPT has 4 of
# 32 x 32 and 2 of 32 x 48, projections of 16 x 32 around its layers and a head of 16. Two layers; 64 tokens to predict.
BODIES = {
    "llama": (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 64 * 32),
    "qwen3": (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 64 * 32),
    "gpt2": (2 * (32 * 96 + 32 * 32 + 2 * 32 * 128), 64 * 32),
    "opt": (2 * (4 * 32 * 32 + 2 * 32 * 48) + 2 * 16 * 32, 64 * 16),
}


@pytest.mark.parametrize("family", BODIES)
def test_a_models_weights_by_hand(family):
    """Tied or not, the head counts and the tables do not."""
    body, head = BODIES[family]
    assert model_shape(tiny_causal_lm(family)) == ModelShape(body, 0, head, 0, attention_width=2 * 32)
    assert model_shape(tiny_causal_lm(family, tie_word_embeddings=False)) == model_shape(tiny_causal_lm(family))


def test_a_reward_model_has_a_head_of_one_row():
    body, _ = BODIES["llama"]
    assert model_shape(tiny_scalar_model("llama")) == ModelShape(body, 0, 32, 0, attention_width=64)


def test_adapters_train_and_the_rest_is_frozen():
    model = add_lora(tiny_causal_lm("llama"), Lora(lora_dim=2))
    body, head = BODIES["llama"]
    # Rank 2: per layer 2 x (inputs + outputs) of q, k, v, o and the gate, up and down projections.
    adapters = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert model_shape(model) == ModelShape(adapters, body, 0, head, attention_width=64)


def test_experts_count_as_often_as_a_token_visits_them():
    config = AutoConfig.for_model(
        "mixtral", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    # 2 of 4 experts of three 32 x 48 matrices, a router of 4 x 32, and Llama's attention.
    body = 2 * 3 * 32 * 48 + 4 * 32 + 2 * 32 * 32 + 2 * 32 * 16
    assert model_shape(AutoModelForCausalLM.from_config(config)).body_trained == body


def test_a_state_space_model_attends_nowhere():
    assert model_shape(tiny_causal_lm("mamba")).attention_width == 0


def test_sharded_weights_count_whole():
    model = tiny_causal_lm("llama")
    whole = model_shape(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert model_shape(model) == whole


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_matmuls_are_those_that_torch_counts(family):
    """Forward and backward of one sequence. torch counts attention as the whole square, and no gradient for the
    embeddings' table; every matmul of the body and of the head counts alike."""
    model = tiny_causal_lm(family).train()
    rows = packed_rows([[plain(run(12, 5))]], 0)
    policy = PolicyModel(model)
    with FlopCounterMode(display=False, depth=None) as counter:
        policy(rows).logprobs_M.sum().backward()
    counts = counter.get_flop_counts()
    matmuls = sum(count for op, count in counts["Global"].items() if "attention" not in str(op))
    # Before transformers 5.19 angles are a matmul of frequencies and positions.
    matmuls -= sum(sum(ops.values()) for name, ops in counts.items() if name.endswith(".rotary_emb"))
    shape = replace(model_shape(model), attention_width=0)
    assert matmuls == training_flops(shape, tokens=12, pairs=0, reads=7)
