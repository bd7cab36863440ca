"""Log-probabilities and scores read at chosen positions equal what the plain models give; what a step is worth in
FLOPs: by hand, against the models' own parameters, and against torch's own counter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_models import FAMILIES, VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.contracts.documents import Document, TokenSequence, join, plain, shared_prompt
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.models.flops import ComputeMeter, ModelShape, model_shape, training_flops, visible_pairs
from training.utils.models.token_model import PolicyModel, Readout, ScalarModel, read_logits

PAD, EOS = 0, 2


def sequences(lengths=(17, 4, 11)) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [join(ids[:2], ids[2:]) for ids in drawn]


def test_read_logits_by_hand():
    # Logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8. At temperature 1/2 they are squared: 1, 4, 25 of 30.
    logits_MV = torch.log(torch.tensor([[1.0, 2.0, 5.0]])).expand(2, 3)
    targets_M = torch.tensor([1, 2])
    plain = read_logits(logits_MV, targets_M, Readout(entropies=True))
    torch.testing.assert_close(plain.logprobs_M, torch.log(torch.tensor([2 / 8, 5 / 8])))
    entropy = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    torch.testing.assert_close(plain.entropies_M, torch.tensor([entropy, entropy]))
    sharp = read_logits(logits_MV, targets_M, Readout(0.5))
    torch.testing.assert_close(sharp.logprobs_M, torch.log(torch.tensor([4 / 30, 25 / 30])))
    assert sharp.entropies_M is None
    rounded = logits_MV.bfloat16()
    half, whole = (read_logits(given, targets_M, Readout(0.7, entropies=True)) for given in (rounded, rounded.float()))
    assert torch.equal(half.logprobs_M, whole.logprobs_M) and torch.equal(half.entropies_M, whole.entropies_M)
    # The sums of 1, 2, 5 and of 1, 4, 25; the last token has the largest logit.
    torch.testing.assert_close(plain.log_normalizers_M, torch.log(torch.tensor([8.0, 8.0])))
    torch.testing.assert_close(sharp.log_normalizers_M, torch.log(torch.tensor([30.0, 30.0])))
    assert plain.is_greedy_M.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_equals_the_models_own_logits(family, temperature):
    """Gemma 2 caps its logits after the head, which reading hidden states through the head alone would miss."""
    model = tiny_causal_lm(family, torch.float64)
    rows = padded_rows(sequences(), PAD)
    with torch.no_grad():
        got = PolicyModel(model)(rows, Readout(temperature, entropies=True, collisions=True))
        alone = PolicyModel(model)(rows, Readout(temperature, collisions=True))  # another way through the head
        logits_NTV = model(input_ids=rows.input_ids_NT, use_cache=False).logits
    exact_MV = torch.log_softmax(logits_NTV.flatten(0, 1)[rows.predictor_M] / temperature, -1)
    torch.testing.assert_close(
        got.logprobs_M.double(), exact_MV.gather(-1, rows.target_ids_M[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(got.entropies_M.double(), -(exact_MV.exp() * exact_MV).sum(-1), rtol=1e-6, atol=1e-5)
    for read in (got, alone):
        torch.testing.assert_close(read.collisions_M.double(), exact_MV.exp().square().sum(-1), rtol=1e-6, atol=1e-6)
    assert PolicyModel(model)(rows).collisions_M is None


def test_a_micro_batch_without_sequences_keeps_the_graph():
    model = tiny_causal_lm("llama")
    loss = PolicyModel(model)(padded_rows([], PAD)).logprobs_M.sum()
    assert loss.item() == 0.0
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.grad.any() for parameter in model.parameters())
    scorer = ScalarModel(tiny_scalar_model("llama"))
    assert scorer(padded_rows([], PAD)).shape == (0,)
    scorer(padded_rows([], PAD), at="targets").sum().backward()
    assert all(parameter.grad is not None for parameter in scorer.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_is_what_plain_transformers_gives(family):
    model = tiny_scalar_model(family)
    rows = padded_rows(sequences(), PAD, min_width=20)
    mask = (rows.segment_ids_NT >= 0).long()
    with torch.no_grad():
        ours_B = ScalarModel(model)(rows)
        plain_B = model(input_ids=rows.input_ids_NT, attention_mask=mask, use_cache=False).logits[:, 0]
        # One more pad token in front of nothing: the score is the last real token's, whatever follows it.
        alone_B = torch.cat([ScalarModel(model)(padded_rows([one], PAD)) for one in sequences()])
    assert ours_B.shape == (3,) and ours_B.dtype == torch.float32
    torch.testing.assert_close(ours_B, plain_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_B, alone_B, rtol=1e-5, atol=1e-5)


def test_a_value_is_read_in_the_state_that_chooses_the_token():
    """The value of the first response token is read at the last prompt token, before the token is known."""
    scorer = ScalarModel(tiny_scalar_model("llama", torch.float64))
    one = join(torch.tensor([5, 6, 7]), torch.tensor([8, EOS]))
    with torch.no_grad():
        values_M = scorer(padded_rows([one], PAD), at="targets")
        for index, seen in enumerate((3, 4)):  # tokens that the state has seen
            prefix = TokenSequence(one.input_ids[:seen], torch.zeros(seen, dtype=torch.bool))
            assert values_M[index] == pytest.approx(scorer(padded_rows([prefix], PAD)).item(), abs=1e-6)
    assert values_M.shape == (2,)


def run(length: int, first_target: int = 99) -> TokenSequence:
    return TokenSequence(torch.arange(1, length + 1), torch.arange(length) >= first_target)


SHAPE = ModelShape(body_trained=128, body_frozen=0, head_trained=40, head_frozen=0, attention_width=4)


def test_a_step_by_hand():
    """The docstring's example; then all weights frozen: 4 a weight instead of 6."""
    assert training_flops(SHAPE, tokens=3, pairs=6, reads=1) == 2304 + 288 + 240
    frozen = ModelShape(0, 128, 0, 40, 4)
    assert training_flops(frozen, tokens=3, pairs=6, reads=1) == 4 * 128 * 3 + 288 + 4 * 40
    # Two sequences of 3 tokens with a target each: 2 x 2832.
    meter = ComputeMeter(SHAPE, peak_flops_per_second=113_280)
    assert meter.flops([plain(run(3, 2)), plain(run(3, 2))], reads=2) == 2 * 2832


@pytest.mark.parametrize(
    "documents", [[plain(run(5)), plain(run(2))], [shared_prompt(run(4), [run(2), run(3), run(1)])]]
)
def test_pairs_are_those_of_the_mask(documents: list[Document]):
    mask = packed_rows([documents], 0).dense_mask()
    assert sum(visible_pairs(document) for document in documents) == int(mask.sum())
    assert visible_pairs(shared_prompt(run(3), [run(2), run(1)])) == 19  # by hand


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
    assert model_shape(tiny_causal_lm("mamba")).attention_width == 0  # a state space attends nowhere
    assert model_shape(tiny_scalar_model("llama")) == ModelShape(BODIES["llama"][0], 0, 32, 0, attention_width=64)
    assert model_shape(tiny_causal_lm(family)) == ModelShape(body, 0, head, 0, attention_width=2 * 32)
    untied = tiny_causal_lm(family, tie_word_embeddings=False)
    assert model_shape(untied) == model_shape(tiny_causal_lm(family))
    for parameter in untied.parameters():  # sharded weights count whole
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert model_shape(untied) == model_shape(tiny_causal_lm(family))


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
