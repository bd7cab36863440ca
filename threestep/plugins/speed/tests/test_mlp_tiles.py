"""MLPs in tiles compute what whole ones do, and hold one tile; what has none to be found is refused by name."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.invariants.peak_program import memory_events, most_at_once
from tests.support.random_rows import random_rows
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.plan.dry_run.activations import read_on_meta
from threestep.plugins.speed.mlp_tiles import TiledMlp, is_tiled, mlps_of, tile_mlps, tokens_of_tile
from threestep.plugins.speed.tests.fast_settings import fast
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import load_causal_lm, prepared
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "experts_implementation": "eager",  # grouped products are of float32 and narrower
    "max_position_embeddings": 128,
}
_MOE = {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


def made(family: str) -> Any:
    torch.manual_seed(2)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4)).double().eval()
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_MOE)).double().eval()
    return tiny_causal_lm(family, torch.float64)


def numbers_of(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a model in train mode returns of packed rows, and its gradients."""
    model.zero_grad()
    model.train()
    module = ScalarModel(model) if hasattr(model, "score") else PolicyModel(model)
    read = module(random_rows(torch.Generator().manual_seed(3), 3, 7))
    read = read if isinstance(read, torch.Tensor) else read.logprobs_M
    read.square().sum().backward()
    return read.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(model: Any, other: Any) -> None:
    (read, gradients), (wanted, wanted_gradients) = numbers_of(other), numbers_of(model)
    assert torch.allclose(read, wanted, rtol=1e-12, atol=1e-12)
    largest = max(float(each.abs().max()) for each in wanted_gradients.values())
    assert gradients.keys() == wanted_gradients.keys() and gradients
    for name, each in gradients.items():
        assert float((each - wanted_gradients[name]).abs().max()) < 1e-12 * largest, name


def settings(**changes: Any) -> ModelSettings:
    return fast(dropout=0.0, **changes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"])
def test_tiles_compute_what_whole_mlps_do(family):
    """In float64: plain, recomputed by layers, and with more tiles than rows have tokens."""
    model = made(family)
    for tiles, recomputes in ((3, False), (3, True), (200, False)):
        tiled = prepared(copy.deepcopy(model), settings(mlp_tiles=tiles, gradient_checkpointing=recomputes))
        assert is_tiled(tiled) and not is_tiled(model)
        assert_same(model, tiled)


def test_scores_adapters_and_a_copy():
    """Of a reward model, also where MLPs keep less; of LoRA's adapters inside of MLPs and beside; of a tiled model's
    copy."""
    scalar = tiny_scalar_model("llama", torch.float64)
    assert_same(scalar, prepared(prepared(copy.deepcopy(scalar), settings()), settings(mlp_tiles=4)))
    assert_same(scalar, tiled := prepared(copy.deepcopy(scalar), settings(mlp_tiles=4)))
    assert_same(scalar, again := copy.deepcopy(tiled))
    tile = next(iter(vars(module)["forward"] for module in again.modules() if "forward" in vars(module)))
    assert tile.whole.__self__ in set(again.modules())
    with_adapters = {"lora_dim": 2, "gradient_checkpointing": True}
    models = []
    for tiles in (1, 4):
        torch.manual_seed(5)
        models.append(prepared(made("llama"), settings(mlp_tiles=tiles, **with_adapters)))
        for name, weight in models[-1].named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    assert_same(*models)


@pytest.mark.parametrize("recomputes", [False, True])
def test_one_tile_is_held(recomputes):
    """All tensors at once in a forward and backward of 2,048 tokens, whose MLPs are 16 times as wide as the model: they
    hold about an eighth. T x F x 4 bytes is 4 MiB; a layer of a Llama saves four such."""
    shape = {"hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    model = tiny_causal_lm("llama", **shape)
    wide, most = 4 * 2048 * 512, {}
    for tiles in (1, 8):
        changed = prepared(copy.deepcopy(model), settings(mlp_tiles=tiles, gradient_checkpointing=recomputes)).train()
        most[tiles] = bytes_at_once(changed)
    whole = (1 if recomputes else 2) * 4 * wide
    assert most[1] > whole
    assert most[8] < most[1] - 0.75 * whole


def bytes_at_once(model: Any) -> int:
    """Bytes of tensors that one forward and backward allocate and hold at once."""
    ids_NT = torch.arange(2048).remainder(VOCABULARY).unsqueeze(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model.base_model(input_ids=ids_NT, use_cache=False)[0].sum().backward()
    return most_at_once(memory_events(profile))


def test_behind_a_cache_mlps_are_whole():
    model = made("llama")
    tile_mlps(model, 3)
    calls: list[int] = []
    for tiled in (vars(module)["forward"] for module in model.modules() if "forward" in vars(module)):
        assert isinstance(tiled, TiledMlp)
        whole = tiled.whole
        tiled.whole = lambda states, whole=whole: (calls.append(states.shape[1]), whole(states))[1]
    ids_NT = torch.arange(9).unsqueeze(0)
    cached = model(input_ids=ids_NT, past_key_values=DynamicCache()).logits
    assert calls == [9, 9]
    assert torch.allclose(model(input_ids=ids_NT, use_cache=False).logits, cached, rtol=1e-12)
    assert calls == [9, 9, *[3] * 6]


def test_the_longest_row_is_read_in_tiles_when_a_model_is_loaded(tmp_path, monkeypatch):
    """Of 100 tokens, alone and beside a short one."""
    tiny_causal_lm("llama", max_position_embeddings=128).save_pretrained(tmp_path)
    seen: list[int] = []
    whole = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, states: (seen.append(states.shape[1]), whole(mlp, states))[1])
    loaded = load_causal_lm(fast(str(tmp_path), mlp_tiles=4), torch.float32, VOCABULARY, longest_tokens=100)
    assert is_tiled(loaded) and 25 <= max(seen) <= 30


def test_a_model_without_mlps_to_be_found_is_refused():
    with pytest.raises(ThreestepError, match=r"--mlp_tiles 2: OPTDecoderLayer of OPTForCausalLM calls no part"):
        tile_mlps(tiny_causal_lm("opt"), 2)
    noisy = MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4, router_jitter_noise=0.1)).eval()
    with pytest.raises(ThreestepError, match="multiplies its input by noise in place"):
        prepared(noisy, fast(mlp_tiles=2))
    prepared(noisy, settings(mlp_tiles=2))


def test_an_mlp_that_reads_its_neighbours_is_refused():
    model = tiny_causal_lm("llama", torch.float64)
    for layer in model.model.layers:
        whole = layer.mlp.forward
        layer.mlp.forward = MethodType(lambda mlp, states, whole=whole: whole(states.cumsum(1) / 9), layer.mlp)
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computes something else in tiles"):
        tile_mlps(model, 2)


def test_the_parts_of_each_layer_are_found_on_the_meta_device():
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4)).bfloat16()
        model.set_experts_implementation("grouped_mm")  # on meta of bfloat16 alone
    found = mlps_of(model, 2, lambda: read_on_meta(model.base_model, 1, 4))
    assert [type(mlp).__name__ for mlps in found.values() for mlp in mlps] == ["MixtralSparseMoeBlock"] * 2
    assert (tokens_of_tile(9, 4), tokens_of_tile(1, 4)) == (3, 1)
