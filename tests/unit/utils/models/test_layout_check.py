"""Whether a model honours packed rows: the good ones, and the reason for each kind of those that do not. Dropout rates,
in the configuration and in the modules, under all names that families give them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.families.builds import draw_weights
from tests.families.configs import tiny_config
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.contracts.token_rows import TokenRows
from training.utils.loading.models import prepared
from training.utils.models.dropout import check_no_dropout, set_dropout
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.own_forward import current_difference, read_own_forward
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel

CPU = torch.device("cpu")
GOOD = ["llama", "qwen3", "gpt2", "opt", "gemma3_text"]


def reason(model: PreTrainedModel, longest_tokens: int = 30, change=lambda rows: rows) -> str | None:
    """What the check says of `model`, or of one that reads `change(rows)` for rows."""
    scalar = hasattr(model, "score")
    read = ScalarModel(model) if scalar else PolicyModel(model)

    def numbers(rows: TokenRows) -> torch.Tensor:
        return read(change(rows)) if scalar else read(change(rows)).logprobs_M

    return why_not_packed(model, numbers, longest_tokens, CPU)


def good(make, family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make(family, dtype, **({"sliding_window": 30} if family == "gemma3_text" else {}))


@pytest.mark.parametrize("make", [tiny_causal_lm, tiny_scalar_model])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.parametrize("family", GOOD)
def test_models_that_honour_the_layout(family, dtype, make):
    assert reason(good(make, family, dtype)) is None


EAGER, LEAK = (
    "its attention implementation 'eager' accepts no mask of segments here",
    "its attention lets one document of a row see another",
)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tiny_causal_lm("bloom"), EAGER),  # ALiBi and a state space: transformers gives them no SDPA
        (lambda: tiny_causal_lm("mamba"), EAGER),
        # ALiBi under SDPA: its forward unpacks a mask of two dimensions
        (lambda: other_family("falcon", alibi=True), "its forward rejects the mask of segments (ValueError: "),
        # Convolutions over the row take no mask: SDPA is its attention, and yet documents leak.
        (lambda: other_family("lfm2", layer_types=["conv", "full_attention"]), LEAK),
    ],
    ids=["bloom", "mamba", "falcon", "lfm2"],
)
def test_families_that_cannot_honour_it(make, said):
    assert reason(make()).startswith(said)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral"])
def test_a_sliding_window_shorter_than_the_sequences(family):
    model = tiny_causal_lm(family) if family != "mistral" else other_family("mistral", sliding_window=8)
    assert reason(model, 9) == "its sliding window of 8 tokens is shorter than the sequences (9 tokens)"
    assert reason(model, 8) is None


def test_a_window_that_is_switched_off_is_no_window():
    model = other_family("smollm3", sliding_window=8, use_sliding_window=False)
    assert model.config.sliding_window == 8 and reason(model) is None


@pytest.mark.parametrize("make", [tiny_causal_lm, tiny_scalar_model])
@pytest.mark.parametrize("family", GOOD)
def test_a_mask_that_a_model_ignores(family, make):
    def all_seen(rows: TokenRows) -> TokenRows:
        segments = rows.segments
        seen = segments and replace(segments, visible_NSS=torch.ones_like(segments.visible_NSS))
        return replace(rows, segments=seen)

    assert reason(good(make, family), change=all_seen) == LEAK


@pytest.mark.parametrize("family", GOOD)
def test_a_mask_that_a_model_makes_up_from_positions(family):
    """Documents stand apart where positions start again (not in OPT), but a second response sees the first."""
    said = reason(good(tiny_causal_lm, family), change=lambda rows: replace(rows, segments=None))
    if family == "opt":
        assert said == LEAK
    else:
        assert said.startswith("a packed row and separate sequences differ by ")


@pytest.mark.parametrize("family", GOOD)
def test_positions_that_a_model_makes_up_itself(family):
    """Counted through the row, the second response stands too far from its prompt."""

    def counted(rows: TokenRows) -> TokenRows:
        positions_T = torch.arange(rows.position_ids_NT.shape[1])
        return replace(rows, position_ids_NT=positions_T.expand_as(rows.position_ids_NT))

    assert reason(good(tiny_causal_lm, family), change=counted).startswith("a packed row and separate sequences differ")


def test_numbers_that_are_none():
    """A NaN is no agreement: not everywhere, nor where it stands on both sides."""
    model = good(tiny_causal_lm, "llama")
    policy = PolicyModel(model)

    def first_is_nan(rows: TokenRows) -> torch.Tensor:
        logprobs_M = policy(rows).logprobs_M
        logprobs_M[0] = float("nan")
        return logprobs_M

    assert why_not_packed(model, first_is_nan, 30, CPU) == "a packed row and separate sequences differ by nan"
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    assert reason(model) is not None


def other_family(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
        num_key_value_heads=1, **({} if name == "falcon" else {"intermediate_size": 48}), **changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("packed", [False, True])
def test_a_short_sequence_that_changes_beside_a_long_one(packed):
    """Before, only the long one's numbers were looked at there."""
    model = tiny_causal_lm("llama")
    read_own_forward(model, longest_tokens=30)
    policy = PolicyModel(model)

    def read(rows: TokenRows) -> torch.Tensor:
        numbers_M = policy(rows).logprobs_M
        if rows.input_ids_NT.shape[1] >= 30:
            numbers_M[0] += 1.0
        return numbers_M

    if packed:
        assert "a packed row and separate sequences differ by" in (why_not_packed(model, read, 30, CPU) or "")
    else:
        with pytest.raises(
            ThreestepError, match=r"^LlamaForCausalLM cannot be trained: its outputs for padded rows and"
        ):
            check_padded(model, read, CPU)


def test_keys_that_are_kept_of_a_whole_row():
    """Doge: a later token may push an earlier one out."""
    model = tiny_causal_lm("llama")
    model.config.keep_window_size = 16
    read_own_forward(model, longest_tokens=30)
    read = PolicyModel(model)
    with pytest.raises(
        ThreestepError, match=r"keeps only 16 keys per row .* sequences have 30 tokens; use sequences of"
    ):
        check_padded(model, lambda rows: read(rows).logprobs_M, CPU)


RATE = 0.3
# Each has names or modules that others lack: layer drop, embedding, residual, activation, hidden and probability rates,
# rates in a nested configuration, in modules' attributes, jitter of routers under two names.
KINDS = (
    "gpt2", "opt", "bloom", "bart", "biogpt", "blenderbot", "codegen", "ctrl", "dbrx", "doge", "gpt_bigcode", "gpt_neo",
    "llama4_text", "minimax", "mixtral", "seed_oss", "starcoder2", "xglm",
)  # fmt: skip


def raise_rates(held: Any) -> Any:
    """Raise every float below 1 whose name mentions it, of a configuration (its parts too) or a model; return it. By
    another way than the code's: any name with `drop` or `jitter` in it."""
    owners = list(held.modules()) if isinstance(held, torch.nn.Module) else [held]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, PreTrainedConfig):
                raise_rates(value)
            elif ("drop" in name or "jitter" in name) and type(value) is float and 0 <= value < 1:
                setattr(owner, name, RATE)
        if isinstance(owner, torch.nn.Dropout):
            owner.p = RATE
    return held


def noisy(family: str) -> Any:
    model = AutoModelForCausalLM.from_config(raise_rates(copy.deepcopy(tiny_config(family))), dtype=torch.float32)
    draw_weights(model, seed=0)
    return raise_rates(model).eval()


@pytest.mark.parametrize("family", KINDS)
def test_no_noise_is_left_under_any_name(family):
    model = noisy(family)
    own = read_own_forward(model)
    assert max(current_difference(model, own, training=True) for _ in range(3)) > own.tolerance
    set_dropout(model, 0.0)
    assert max(current_difference(model, own, training=True) for _ in range(3)) <= own.tolerance


class DropPath(torch.nn.Module):  # as timm's
    drop_prob = 0.0


class StableDropout(torch.nn.Module):  # as families that wrote their own
    drop_prob = 0.0


def test_a_rate_is_of_dropout_alone():
    model = tiny_causal_lm("gpt2", embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1, summary_first_dropout=0.1)
    layer = model.transformer.h[0]
    layer.path, layer.stable = DropPath(), StableDropout()
    layer.path.drop_prob = layer.stable.drop_prob = 0.2
    layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate, layer.attn_dropout_p = 0.1, 0.1, 0.1, 0.1
    set_dropout(model, RATE)
    assert (layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate) == (0.1, 0.1, 0.1)
    assert layer.attn_dropout_p == model.config.embd_pdrop == layer.attn.attn_dropout.p == RATE
    assert model.config.summary_first_dropout == 0.1
    assert (layer.path.drop_prob, layer.stable.drop_prob) == (0.2, RATE)
    set_dropout(model, 0.0)
    assert (layer.path.drop_prob, layer.stable.drop_prob) == (0.0, 0.0)
    assert (layer.layerdrop, layer.router_jitter_noise, layer.drop_path_rate, layer.attn_dropout_p) == (0, 0, 0, 0)


def test_what_merely_sounds_like_it_stays():
    model = tiny_causal_lm("llama")
    layer = model.model.layers[0]
    others = {
        "use_dropout": True, "dropout_layers": 3, "num_dropout": 2.0, "dropout_mode": "all", "drop_tokens": 0.5,
        "dropout_temperature": 0.7, "dropout_start_step": 0.5, "classifier_dropout": None,
    }  # fmt: skip
    for owner in (layer, model.config):
        for name, value in others.items():
            setattr(owner, name, value)
    for rate in (RATE, 0.0):
        set_dropout(model, rate)
        for owner in (layer, model.config):
            assert {name: getattr(owner, name) for name in others} == others


def test_noise_under_no_name_is_refused():
    """Known by what it computes: no dropout flag reaches it."""
    model = tiny_causal_lm("llama")
    model.model.norm.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.dropout(output, 0.2, module.training)
    )
    prepared(model, ModelSettings(""))
    with pytest.raises(
        ThreestepError, match="LlamaForCausalLM computes different outputs in train mode with dropout 0: "
    ):
        prepared(model, ModelSettings("", dropout=0.0, gradient_checkpointing=True))


def test_what_a_model_computes_with_in_eval_mode_stays():
    """PhiMoE's "jitter" is the width of a mask over its experts, also in eval mode; in train mode it draws besides."""
    model = AutoModelForCausalLM.from_config(tiny_config("phimoe"))
    draw_weights(model, seed=0)
    own = read_own_forward(model.eval())
    with pytest.raises(
        ThreestepError, match=r"^PhimoeForCausalLM computes different outputs in train mode with dropout"
    ):
        prepared(model, ModelSettings("m", dropout=0.0))
    assert model.config.router_jitter_noise == 0.1 and model.config.attention_dropout == 0.0
    assert own.notes == ["router_jitter_noise is unchanged: without it, the outputs change in eval mode too"]


def test_noise_that_rounding_would_explain_is_still_noise():
    """In half precision the tolerance is wide; a CPU rounds the same numbers alike."""
    model = tiny_causal_lm("llama")
    own = read_own_forward(model)
    model._threestep_own_forward = replace(own, tolerance=100.0)
    check_no_dropout(model)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(ThreestepError, match=r"^LlamaForCausalLM is random in train mode with dropout 0; remove"):
        check_no_dropout(model)
