"""What a model's own forward gives is what steps read, whatever its family does after the trunk; what is not causal, or
does not stay the same in train mode, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import FAMILIES, VOCABULARY, tiny_causal_lm, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models import own_forward
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.own_forward import (
    current_difference,
    make_probes,
    own_forward_of,
    read_own_forward,
)
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel

CPU = torch.device("cpu")
LLAMA = FAMILIES["llama"]


def wide(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights so wide that every setting shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype) * 0.3)
    return model.eval()


def family(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(
        name, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings
    )
    return wide(AutoModelForCausalLM.from_config(config, dtype=dtype))


def reader(model: PreTrainedModel) -> Callable[[TokenRows], torch.Tensor]:
    policy = PolicyModel(model)
    return lambda rows: policy(rows).logprobs_M


# Families whose logits are more than one linear layer on the trunk's last hidden state.
MORE_THAN_LINEAR = {
    "cohere": lambda: family("cohere", **{**LLAMA, "logit_scale": 0.5}),
    "granite": lambda: family("granite", **{**LLAMA, "logits_scaling": 3.0}),
    "falcon_h1": lambda: family(
        "falcon_h1", **LLAMA, lm_head_multiplier=3.0, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8
    ),
    "recurrent_gemma": lambda: family(
        "recurrent_gemma", **LLAMA, lru_width=32, logits_soft_cap=2.0, attention_window_size=64
    ),
    "modernbert-decoder": lambda: family(
        "modernbert-decoder", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, cls_token_id=3, sep_token_id=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE_THAN_LINEAR)
def test_log_probabilities_are_those_of_the_models_own_logits(name):
    """Before, three names of settings were known, and any other family trained on other log-probabilities."""
    model = MORE_THAN_LINEAR[name]()
    own = read_own_forward(model)
    assert not own.head_is_linear
    policy = PolicyModel(model)
    with torch.no_grad():
        for document in own.probes.alone:
            ids = document.segments[0].tokens.input_ids
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
            targets = torch.nonzero(document.segments[0].tokens.is_target).flatten()
            expected = logprobs[targets - 1, ids[targets]]
            got = policy(packed_rows([[document]], 0)).logprobs_M
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "opt"])
def test_a_linear_head_is_read_where_tokens_are_predicted(name):
    assert read_own_forward(tiny_causal_lm(name)).head_is_linear
    assert read_own_forward(tiny_scalar_model(name)).head_is_linear


def test_a_model_whose_trunk_is_itself():
    """`base_model` is the model where the family gives no prefix: its output is logits, not a hidden state."""
    model = tiny_causal_lm("llama", torch.float64)
    own = read_own_forward(model)
    type(model).base_model_prefix, before = "", type(model).base_model_prefix
    try:
        other = read_own_forward(model)
        assert model.base_model is model and not other.head_is_linear
        check_padded(model, reader(model), CPU)
    finally:
        type(model).base_model_prefix = before
    assert torch.equal(own.numbers_M, other.numbers_M)


class Scaled(nn.Module):
    """A scalar head of two layers."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(head.in_features, 8).to(head.weight.dtype),
            nn.Linear(8, 1).to(head.weight.dtype),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(hidden)))


def test_a_scalar_head_of_its_own():
    model = tiny_scalar_model("llama", torch.float32)
    model.score = Scaled(model.score)
    own = read_own_forward(model)
    scorer = ScalarModel(model)
    assert not own.head_is_linear
    check_padded(model, scorer, CPU)
    assert why_not_packed(model, scorer, 12, CPU) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {}),
        ("roberta", {"max_position_embeddings": 64}),
        ("electra", {"embedding_size": 16}),
        ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48}),
    ],
)
def test_an_encoder_is_not_causal(name, settings):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = family(name, torch.float32, **({**sizes, **settings} if name != "xlnet" else settings))
    with pytest.raises(ThreestepError, match=r"is not causal: the second half of a sequence changes the outputs"):
        read_own_forward(model)


def with_forward(forward: Callable[..., Any]) -> PreTrainedModel:
    """A Llama of a class whose forward is another."""
    model = tiny_causal_lm("llama")
    model.__class__ = type("Other", (type(model),), {"forward": forward})
    return model


def refuses(self: Any, **inputs: Any) -> Any:
    raise KeyError("pixel_values")


def changes(self: Any, *inputs: Any, **others: Any) -> Any:
    self.lm_head.weight.div_(1)
    return super(type(self), self).forward(*inputs, **others)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (refuses, r"^Other cannot be used: .*\(KeyError: 'pixel_values'\)"),  # a model of images alone
        # RWKV divides some by a power of two in eval mode, and a folder that is saved then is another model.
        (changes, r"^Other changes 1 of its own weights in a forward pass \(lm_head.weight\)"),
    ],
)
def test_a_forward_that_cannot_be_read(forward, words):
    with pytest.raises(ThreestepError, match=words):
        read_own_forward(with_forward(forward))


def test_no_memory_is_not_blamed_on_the_model():
    def full(self: Any, **inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = with_forward(full)
    for read in (
        lambda: read_own_forward(model),
        lambda: check_padded(model, lambda rows: model(input_ids=rows.input_ids_NT).logits, CPU),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            read()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(number):
    model = tiny_causal_lm("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = number
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computes nan from its loaded weights in float32"):
        read_own_forward(model)


def test_attention_that_branches_on_its_name_keeps_it(tmp_path, monkeypatch):
    """As sparse-index attention does (`in ("eager", "sdpa")`): under another name it computes something else."""
    tiny_causal_lm("llama", torch.float32).save_pretrained(tmp_path)
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    def by_name(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = 1.0 if self.config._attn_implementation in ("eager", "sdpa") else 1.5
        return plain(self, hidden_states * scale, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_name)
    model = load_causal_lm(ModelSettings(str(tmp_path)), torch.float32, VOCABULARY)
    own = own_forward_of(model)
    assert own is not None and model.config._attn_implementation == "sdpa"
    assert own.notes == ["attention stays 'sdpa': the switch changes the model's outputs"]
    assert current_difference(model, own) == 0.0


def test_train_mode_with_dropout_zero_that_still_draws(tmp_path, monkeypatch):
    tiny_causal_lm("llama", torch.float32).save_pretrained(tmp_path)
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaMLP.forward

    def drawn(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return plain(self, hidden) * (1.1 if self.training else 1.0)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", drawn)
    with pytest.raises(ThreestepError, match="computes different outputs in train mode with dropout 0"):
        load_causal_lm(ModelSettings(str(tmp_path), dropout=0.0), torch.float32, VOCABULARY)
    load_causal_lm(ModelSettings(str(tmp_path)), torch.float32, VOCABULARY)  # its own rates are the user's choice


def test_it_is_measured_in_eval_mode_and_leaves_no_trace():
    model = tiny_causal_lm("gpt2").train()
    model.transformer.h[0].eval()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    read_own_forward(model, 40)
    assert model.training and not model.transformer.h[0].training and model.transformer.h[1].training
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_probes_hold_no_special_token_and_one_sequence_as_long_as_the_training():
    config = tiny_causal_lm("llama").config
    config.image_token_id, config.pad_token_id, config.eos_token_id = 7, 0, [2, 3]
    probes = make_probes(config, 40)
    assert [document.tokens for document in probes.alone] == [8, 9, 6, 7, 40]
    used = set(torch.cat([document.segments[0].tokens.input_ids for document in probes.alone]).tolist())
    assert not used & {0, 1, 2, 3, 7} and make_probes(config, 9).long is None


def test_a_new_head_whose_score_is_near_zero_is_causal():
    """Of 1,500 new heads these gave so little noise in the last tokens' scores that the rounding of the others was
    taken for an encoder's: the first two on one thread, the others on two."""
    model = tiny_scalar_model("llama", vocab_size=378, pad_token_id=1).eval()
    for seed in (205, 966, 1169, 1301):
        torch.manual_seed(seed)
        nn.init.normal_(model.score.weight, std=0.02)
        read_own_forward(model)


EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", EXPERTS),
        ("olmoe", EXPERTS),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    ],
)
def test_experts_that_round_by_batch_are_packed(name, settings):
    """Expert batches round differently beside other documents; no gradient passes between the documents."""
    sizes = {key: value for key, value in LLAMA.items() if key != "head_dim"}
    for seed in range(3):
        model = wide(family(name, torch.float32, **sizes, **settings), seed)
        assert why_not_packed(model, reader(model), 12, CPU) is None, seed
    with torch.no_grad():  # as the evaluation reads it
        assert why_not_packed(model.requires_grad_(False), reader(model), 12, CPU) is None


def test_a_leak_below_rounding_is_found_by_its_gradient():
    """In bfloat16 a leak may move numbers by less than rounding does; its gradient is still not zero."""
    model = family("lfm2", torch.bfloat16, **LLAMA, layer_types=["conv", "full_attention"])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.05)
    reason = why_not_packed(model, reader(model), 12, CPU)
    assert reason == "its attention lets one document of a row see another"


def test_positions_that_depend_on_the_length_of_a_row():
    """Phi-3's long factors take the place of the short ones for the whole row, beyond so many tokens."""
    long_rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    model = family("phi3", **LLAMA, rope_parameters=long_rope, original_max_position_embeddings=16)
    read_own_forward(model, longest_tokens=16)
    with pytest.raises(
        ThreestepError, match=r"depend on a row.s length .*: without the second half of 20 tokens, .* shorter seq"
    ):
        read_own_forward(model, longest_tokens=20)


def test_a_long_row_is_read_in_part(monkeypatch):
    """Every rank reads it, also where several share the rows of the training."""
    monkeypatch.setattr(own_forward, "MOST_LONG_TOKENS", 20)
    whole, cut = (read_own_forward(tiny_causal_lm("llama"), longest_tokens=tokens) for tokens in (20, 21))
    assert (whole.probes.long.tokens, whole.notes) == (20, [])
    assert (cut.probes.long.tokens, cut.probes.longest_tokens) == (20, 21)
    assert cut.notes == ["the startup check covers 20 of 21 tokens of a sequence"]
