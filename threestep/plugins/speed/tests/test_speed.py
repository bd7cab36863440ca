"""Flags of speed together, dry runs that count them, layer inputs on the host, and MLPs in tiles."""

from __future__ import annotations

import copy
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.invariants.peak_program import memory_events
from tests.invariants.peak_program import most_at_once as most_held_at_once
from tests.support.cuda_stand_in.device import counted
from tests.support.lora_settings import lora_settings
from tests.support.ppo_flags import ppo_flags
from tests.support.random_rows import random_rows
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.plan.dry_run.activations import saved_activations
from threestep.plugins.plan.dry_run.meta import as_counted
from threestep.plugins.plan.dry_run.plan import LargestForward, inputs_on_host, plan_training
from threestep.plugins.plan.dry_run.table import most_at_once
from threestep.plugins.plan.tests.dry_run.test_dry_run_memory import (
    GPU,
    HIDDEN,
    INNER,
    LAYERS,
    LONG,
    ROWS,
    TOKENS,
    built,
    eight_billion,
    planned,
)
from threestep.plugins.speed.activation_offload import OffloadedInput, check_offloads, offload_inputs
from threestep.plugins.speed.arguments import CompilingArguments, PpoSpeedArguments, SpeedArguments
from threestep.plugins.speed.checks import check, step_needs
from threestep.plugins.speed.mlp_tiles import TiledMlp, is_tiled, tile_mlps
from threestep.plugins.speed.preparers import FusedKernels, InputsOnHost, LeanParts, MlpsInTiles, preparers
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.engine.config.arguments import EngineSettings
from training.utils.flags.added import added_flags
from training.utils.flags.flags import note_mistakes
from training.utils.loading.models import load_causal_lm, prepared
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel

FLAGS = ("activation_offload", "mlp_tiles", "use_liger_kernel", "torch_compile")


def fast(name: str = "tiny", **changes: Any) -> ModelSettings:
    """changes: flags of this plugin, in steps 1 and 2, and settings of the model."""
    given = {flag: changes.pop(flag) for flag in FLAGS if flag in changes}
    kind = added_flags("step1_sft")
    added = kind()
    for field in kind.__dataclass_fields__:
        for flag in given.keys() & vars(getattr(added, field)).keys():
            setattr(getattr(added, field), flag, given[flag])
    return lora_settings(name, **changes, preparers=tuple(preparers(added, "")))


def mistakes_of(compiles: bool = False, *, settings: Any = None, **given: Any) -> list[str]:
    mistakes, own = Mistakes(), SpeedArguments(**given)
    note_mistakes(own, mistakes)
    groups = {SpeedArguments: own, CompilingArguments: CompilingArguments(compiles)}
    check(SimpleNamespace(added=SimpleNamespace(of=groups.get), settings=settings or {}), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mlp_tiles": 0}, "--mlp_tiles expects 1 or more, got 0"),
        (
            {"mlp_tiles": 4, "compiles": True},
            "--mlp_tiles 4 and --torch_compile change the same forward pass and have",
        ),
        (
            {"use_liger_kernel": True, "compiles": True},
            "--use_liger_kernel and --torch_compile fuse the same operations",
        ),
        (
            {"activation_offload": True},
            "--activation_offload moves to host memory the layer inputs that gradient",
        ),
        (
            {"compiles": True, "settings": {"load_in_8bit": True}},
            "--load_in_8bit does not work with --torch_compile, which",
        ),
    ],
)
def test_mistakes(given, sentence):
    [found] = mistakes_of(**given)
    assert found.startswith(sentence)


def test_what_goes_together():
    assert mistakes_of() == mistakes_of(True) == []
    assert mistakes_of(activation_offload=True, settings={"critic_gradient_checkpointing": True}, mlp_tiles=2) == []


def test_compiled_models_read_whole_rows():
    for compiles in (False, True):
        flags = SimpleNamespace(added=SimpleNamespace(of={CompilingArguments: CompilingArguments(compiles)}.get))
        assert step_needs(flags).whole_rows == {"--torch_compile": compiles}


def test_replayed_routers_are_those_of_whole_rows():
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    with pytest.raises(
        ThreestepError, match="--mlp_tiles 2 computes routers tile by tile, but --replay_routers follow"
    ):
        checked_components(ppo_flags(**names, replay_routers="follow", mlp_tiles=2))


@pytest.mark.parametrize(("given", "fuses"), [(None, False), (False, False), (True, True)])
def test_kernels_are_fused_in_all_four_models_of_step_3_where_they_are_asked_for(given, fuses):
    flags = ppo_flags(actor_model_name_or_path="a", critic_model_name_or_path="c", use_liger_kernel=given)
    assert isinstance(flags.added.of(SpeedArguments), PpoSpeedArguments)
    for model in (flags.model("actor"), flags.model("critic")):
        assert model.preparers == model.as_it_is().preparers == (FusedKernels(fuses), LeanParts())


def test_models_without_flags_keep_less_and_fuse_where_they_can():
    assert ModelSettings("a").preparers == (FusedKernels(None), LeanParts()) == fast("a").preparers
    every = fast("a", mlp_tiles=2, activation_offload=True, torch_compile=True, gradient_checkpointing=True)
    assert every.compiles and inputs_on_host(every) and len(every.preparers) == 5
    assert every.as_it_is() == fast("a", mlp_tiles=2)
    assert as_counted(every).preparers == (LeanParts(),)


def test_mlps_in_tiles_keep_their_inputs_and_one_tile(tmp_path):
    """A layer of a Llama keeps of its MLP, beside its input: gate and up, T x 48 numbers each; in tiles also activation
    and product."""
    whole, tiled = (
        saved_activations(built(tmp_path, "llama"), ROWS, TOKENS, preparers=each) for each in ((), (MlpsInTiles(4),))
    )
    inner = 2 * ROWS * TOKENS * 48 * 4
    assert [before - after for before, after in zip(whole.layers, tiled.layers, strict=True)] == [inner] * 5
    assert tiled.piece == 2 * inner // 4 and tiled.layer == tiled.layers[0] + tiled.piece
    assert (whole.outside, whole.boundary) == (tiled.outside, tiled.boundary)
    assert whole.held(False) - tiled.held(False) == 5 * inner - inner // 2
    # The widest tensor is the product of T x 48; in tiles it is a norm's T x 32.
    assert (whole.widest, tiled.widest) == (ROWS * TOKENS * 48 * 4, ROWS * TOKENS * 32 * 4)
    with pytest.raises(ThreestepError, match="OPTDecoderLayer"):
        saved_activations(built(tmp_path, "opt"), ROWS, TOKENS, preparers=(MlpsInTiles(4),))


def test_layers_that_keep_all_hold_activation_product_and_normalized_inputs_too(tmp_path):
    model = built(tmp_path, "llama")
    less, whole = (saved_activations(model, ROWS, TOKENS, keep_all=choice) for choice in (False, True))
    inner = 2 * ROWS * TOKENS * 48 * 4  # activation and product, T x 48 numbers each
    norm = ROWS * TOKENS * 32 * 4
    assert [kept - without for kept, without in zip(whole.layers, less.layers, strict=True)] == [inner + 2 * norm] * 5
    assert whole.outside - less.outside == norm  # of the last
    assert saved_activations(model, ROWS, TOKENS) == less  # the model is as it was


def test_tiles_and_offloaded_inputs_of_an_8_billion_model():
    """What they take off the lines above, at P 1 and 8: MLPs in 8 tiles, and the inputs of 32 layers on the host."""
    model, most = eight_billion(), dict[int, float]()
    for sharing in (1, 8):
        t = LONG // sharing
        plain, lean = planned(model, sharing), planned(model, sharing, preparers=(MlpsInTiles(8), InputsOnHost()))
        lines = [{line.name.split(",")[0]: line for line in plan.forward} for plan in (plain, lean)]
        before, after = (each["activations"].device_bytes for each in lines)
        # Of the recomputed layer's gate, up, activation and product seven of eight tiles: 4 * 14,336 * 2 bytes a token,
        # 15.0 GB with P 1 (13.2 of them gone). Of the layers' inputs all but one: 34.4 GB with P 1, 4.3 with 8.
        tiles, inputs = 4 * INNER * 2 * t * 7 / 8, (LAYERS - 1) * HIDDEN * 2 * t
        assert before - after == pytest.approx(tiles + inputs, rel=1e-6)
        # The widest tensor was an MLP's, 14,336 numbers of 2 bytes a token; it is a norm's float32 input, 4,096 of 4.
        widths = [each["gradients of activations"].device_bytes / (3 * t) for each in lines]
        assert widths == [INNER * 2, HIDDEN * 4]
        on_host = next(line for line in lean.forward if "host" in line.name)
        assert (on_host.device_bytes, on_host.host_bytes) == (0, LAYERS * HIDDEN * 2 * t)  # already powers of two
        most[sharing] = most_at_once(lean.engine.held, lean.moments)[0].device_bytes / 1e9
    # 100.2 and 34.4 without them. A GPU of 80 GB, less a tenth, holds the row alone.
    assert most == pytest.approx({1: 48.9, 8: 28.0}, abs=0.1)
    assert GPU.leaves_room(int(most[1] * 1e9))


def test_offloading_is_refused_on_a_cpu_that_is_planned_for():
    loading = ModelSettings("8b", gradient_checkpointing=True, preparers=(InputsOnHost(),))
    forward = LargestForward(1, 128, 128, masked=True)
    with pytest.raises(ThreestepError, match="--activation_offload moves layer inputs from GPU"):
        plan_training(eight_billion(), forward, loading, EngineSettings("bf16"), ranks=1, device=PlannedDevice(False))


DEPTH = 4


def recomputed(family: str, offloads: bool, **changes: Any) -> Any:
    settings = fast(dropout=0.0, gradient_checkpointing=True, activation_offload=offloads, **changes)
    torch.manual_seed(1)
    depth = {"n_layer": DEPTH} if family == "gpt2" else {"num_hidden_layers": DEPTH}
    return prepared(tiny_causal_lm(family, **depth), settings).train()


def gradients_of(model: Any, rows: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    PolicyModel(model)(rows).logprobs_M.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("gpt2", {}), ("llama", {"lora_dim": 2}), ("llama", {"mlp_tiles": 3})]
)
def test_gradients_are_those_of_recomputation_to_the_bit(family, changes):
    """Also where the host's memory is the device's, which a run refuses."""
    rows = random_rows(torch.Generator().manual_seed(2), 3, 6)
    wanted, found = (gradients_of(recomputed(family, offloads, **changes), rows) for offloads in (False, True))
    assert wanted.keys() == found.keys() and wanted
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_layers_are_wrapped_once_and_those_alone_that_recompute():
    model = recomputed("llama", True)
    offload_inputs(model)
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert all(isinstance(each, OffloadedInput) for each in functions)
    assert not any(isinstance(each.recompute, OffloadedInput) for each in functions)
    plain = tiny_causal_lm("llama")
    offload_inputs(plain)
    assert not hasattr(plain.model.layers[0], "_gradient_checkpointing_func")


def on_the_device() -> dict:
    """Gradients with and without, and what each costs beside the same operators."""
    rows, found, costs = random_rows(torch.Generator().manual_seed(2), 3, 6).to("cuda"), [], []
    for offloads in (False, True):
        model = recomputed("llama", False).to("cuda")
        if offloads:
            offload_inputs(model)
        with counted() as counts:
            found.append(gradients_of(model, rows))
        costs.append({**counts.totals(), "lines": counts.lines()})
    equal = all(torch.equal(found[1][name], each) for name, each in found[0].items())
    return {"equal": equal, "plain": costs[0], "offloaded": costs[1]}


def test_on_a_gpu_inputs_go_to_pinned_memory_and_back_without_a_wait(on_cuda):
    found = on_cuda(on_the_device)
    assert found["equal"]
    more = {kind: found["offloaded"][kind] - found["plain"][kind] for kind in ("waits", "to_device", "from_device")}
    assert more == {"waits": 0, "to_device": DEPTH, "from_device": DEPTH}
    lines = [line for line in found["offloaded"]["lines"] if "activation_offload.py" in line]
    assert lines and all("pinned, without waiting" in line for line in lines)


def test_a_cpu_is_refused():
    with pytest.raises(ThreestepError, match="does nothing on a CPU; remove --activation_offload"):
        check_offloads(False)
    check_offloads(True)


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
    return most_held_at_once(memory_events(profile))


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
    with pytest.raises(ThreestepError, match=r"--mlp_tiles 2: no submodule of OPTDecoderLayer in OPTForCausalLM"):
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
    with pytest.raises(ThreestepError, match="LlamaForCausalLM computes different results when tiled"):
        tile_mlps(model, 2)
