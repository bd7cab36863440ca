"""Memory of a dry run: as real forwards keep it, by the ZeRO paper and by hand, and the ranks that share a row."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.support.kept_bytes import kept_bytes
from tests.support.lora_settings import lora_settings
from threestep.plugins.plan.dry_run.activations import cache_bytes, head_bytes, saved_activations
from threestep.plugins.plan.dry_run.attention_memory import mask_lines
from threestep.plugins.plan.dry_run.engine_memory import (
    _states_of,
    gathered_elements,
    pinned_shards,
    trained_memory,
    weights_memory,
)
from threestep.plugins.plan.dry_run.estimate import Estimate
from threestep.plugins.plan.dry_run.meta import model_on_meta
from threestep.plugins.plan.dry_run.plan import LargestForward, PlannedModel, plan_training
from threestep.plugins.plan.dry_run.sharing import advised_sharing, print_advice
from threestep.plugins.plan.dry_run.table import most_at_once
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
from training.utils.engine.config.arguments import ADAMW, OPTIMIZERS, EngineSettings
from training.utils.models.document_attention import use_document_attention
from training.utils.models.row_sharing import RowSharing
from training.utils.models.settings import ModelSettings
from training.utils.plugins.plugin import OptimizerEntry

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
    AutoConfig.for_model(family, **SHAPE, **FAMILIES[family]).save_pretrained(tmp_path)
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
    AutoConfig.for_model(family, **{**SHAPE, "num_hidden_layers": 2}, pad_token_id=0).save_pretrained(tmp_path)
    model = model_on_meta(ModelSettings(str(tmp_path)), torch.float32)
    assert saved_activations(model, ROWS, TOKENS).held(False) > ROWS * TOKENS * SHAPE["hidden_size"] * 4
    assert head_bytes(model, targets=8, positions=ROWS * TOKENS) > 0


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])
def test_it_is_what_a_real_forward_keeps(tmp_path, family):
    on_meta = built(tmp_path, family)
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32).train()
    for module in (*real.modules(), *on_meta.modules()) if "gpt" in family else ():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
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


def test_layers_of_two_kinds_are_counted_and_frozen_matrices_keep_less(tmp_path):
    model = built(tmp_path, "gemma2")  # sliding and full attention in turns
    counted = saved_activations(model, ROWS, TOKENS)
    assert len(counted.layers) == 5 and len(model.model.layers) == 5
    assert counted.held(False) > counted.held(True) > 5 * counted.boundary
    whole = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    lora = built(tmp_path, "llama", lora_dim=2, lora_module_name="q_proj")
    assert {part.device.type for part in lora.parameters()} == {"meta"}
    assert saved_activations(lora, ROWS, TOKENS).held(False) < whole.held(False)


def test_checkpointing_keeps_inputs_and_one_layer_and_with_offload_one_input(tmp_path):
    counted = saved_activations(built(tmp_path, "llama"), ROWS, TOKENS)
    assert counted.boundary == ROWS * TOKENS * 32 * 4
    assert counted.held(True) == counted.outside + 5 * counted.boundary + max(counted.layers)
    assert counted.held(True) - counted.held(True, offloaded=True) == 4 * counted.boundary


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


def total(*args, element_bytes: int, by_document: bool = False) -> int:
    lines = mask_lines(*args, element_bytes=element_bytes, by_document=by_document)
    return sum(line.device_bytes for line in lines)


def test_masks_by_hand():
    """Qwen2.5 7B, 4 rows of 8,192 in bfloat16: 28 masks of 0.5 GiB, beside one of booleans."""
    masks = mask_lines("sdpa", 4, 8192, 28, element_bytes=2, by_document=False)
    assert [line.device_bytes for line in masks] == [2**28, 28 * 2**29]
    assert total("sdpa", 4, 8192, 1, element_bytes=2) == 2**28 + 2**29  # recomputed layer by layer
    # rows of whole multiples of 16 bytes: 10 numbers of 2 bytes take 16
    assert total("sdpa", 1, 10, 1, element_bytes=2) == 100 + 10 * 16 * 2
    # 4 x 8,192 tokens are 256 blocks: numbers of blocks and their places, partial and full, and their transposes
    assert total("flex_attention", 4, 8192, 28, element_bytes=2) == 16 * (256**2 + 256)
    assert total("flash_attention_2", 4, 8192, 28, element_bytes=2) == 0
    # a run a token: int32 where it begins, twice, and int64 which token its key is
    assert total("varlen", 4, 8192, 28, element_bytes=2) == (4 + 4 + 8) * 4 * 8192
    assert total("sdpa", 2, 10, 5, element_bytes=4, by_document=True) == 2 * 100 * 5  # once, as bool and as numbers


def test_what_sdpa_keeps_of_a_boolean_mask_here_is_one_converted_mask_a_call():
    """The kernel for CPUs converts and keeps it as the one for CUDA does (torch 2.13)."""
    rows, tokens, kept = 2, 32, {}
    query = torch.randn(rows, 2, tokens, 8, requires_grad=True)
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool).tril()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == mask.shape[-2:]:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(3):
            query = scaled_dot_product_attention(query, query, query, attn_mask=mask)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found == mask_lines("sdpa", rows, tokens, 3, element_bytes=4, by_document=False)[1].device_bytes


BUCKETS = {"reduce_bucket_size": 500, "stage3_max_live_parameters": 300, "stage3_max_reuse_distance": 300}


def memory_of(zero: dict, ranks: int = 2, *, weights: int = 1000, trained: int = 0, largest: int = 100,
              dtype: str = "bf16", **more):  # fmt: skip
    zero = {**BUCKETS, **zero}
    return trained_memory(weights, trained or weights, largest, dtype, zero=zero, ranks=ranks, **more)


def held(zero: dict, ranks: int = 2, **more) -> tuple[int, int]:
    memory = memory_of(zero, ranks, **more)
    return sum(line.device_bytes for line in memory.held), sum(line.host_bytes for line in memory.held)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_it_is_figure_1_of_the_zero_paper(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5 billion weights in float16 on 64 GPUs."""
    device, host = held({"stage": stage}, 64, weights=7_500_000_000, dtype="fp16")
    assert device / 1e9 == pytest.approx(gigabytes, abs=0.05) and host == 0


def test_gradients_in_float32_and_states_in_bfloat16():
    """1000 weights on 2 ranks: 2 weights + 2 gradients / 2 + (2 + 4) / 2."""
    # 2 weights + 4 gradients / 2 ranks + 12 / 2 = 2 + 2 + 6
    assert held({"stage": 2}) == (10_000, 0)
    # stage 1 keeps the float32 sums whole, beside the bf16 gradients: 2 + 6 + 12 / 2
    assert held({"stage": 1}) == (14_000, 0)
    for stage, bytes_a_weight in ((1, 2 + 2 + 3), (2, 2 + 1 + 3), (3, 1 + 1 + 3)):
        assert held({"stage": stage}, bf16_states=True)[0] == 1000 * bytes_a_weight
    assert held({"stage": 0}, 1, trained=16, dtype="fp32") == (4 * 1000 + 12 * 16, 0)


def test_offload_moves_the_optimizer_and_at_stage_3_everything():
    cpu = {"device": "cpu"}
    # device: 2 weights + 4 / 2 gradients; host: 12 / 2 and the optimizer's float32 gradients, 4 / 2
    assert held({"stage": 2, "offload_optimizer": cpu}) == (4000, 8000)
    # host: (2 + 4 + 12 + 4) / 2
    assert held({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}) == (0, 11_000)


@pytest.mark.parametrize(("stage", "optimizer"), [(0, 8), (1, 8 / 2), (2, 8 / 2), (3, 12 / 2)])
def test_float32_weights_are_held_once_below_stage_3(stage, optimizer):
    assert memory_of({"stage": stage}, dtype="fp32").optimizer.device_bytes == 1000 * optimizer


def test_stage_3_gathers_what_may_live():
    """Half of the distance of 800 comes before the backward begins, and a module of 100 is gathered beside it."""
    assert memory_of({"stage": 3}).buffers.device_bytes == (500 + 300 + 100) * 2
    assert memory_of({"stage": 3}, largest=900).buffers.device_bytes == (500 + 1000) * 2  # no more than there is
    far = memory_of({"stage": 3, "stage3_max_reuse_distance": 1200})
    assert far.buffers.device_bytes == (500 + 600 + 100) * 2
    zero = {**BUCKETS, "stage": 3, "stage3_max_reuse_distance": 800}
    assert gathered_elements(1000, 100, zero, trains=True) == 400 + 100
    assert gathered_elements(1000, 100, zero, trains=False) == 300 + 100
    assert gathered_elements(450, 100, zero, trains=True) == 450  # there are no more


def test_a_second_copy_is_sharded_over_a_node():
    zero = {**BUCKETS, "stage": 3, "zero_hpz_partition_size": 4}
    plain, with_copy = (held({**zero, **other}, 8) for other in ({"zero_hpz_partition_size": 1}, {}))
    assert with_copy[0] - plain[0] == 2 * 1000 // 4
    on_host = memory_of({**zero, "offload_param": {"device": "cpu"}}, 8).secondary
    assert (on_host.device_bytes, on_host.host_bytes) == (0, 500)


def test_pinned_memory_comes_in_powers_of_two():
    pinned = {"device": "cpu", "pin_memory": True}
    # stage 2, 500 weights a rank: float32 weights and gradients 2000 -> 2048 bytes each, bfloat16 1000 -> 1024
    memory = memory_of({"stage": 2, "offload_optimizer": pinned})
    assert memory.pinned.host_bytes == 48 + 48 + 24
    # stage 3: sums of gradients 2000 -> 2048, the step's in groups of 300 and what is left, weights 1000 -> 1024
    zero = {"stage": 3, "offload_optimizer": pinned, "offload_param": pinned, "sub_group_size": 300}
    memory = memory_of(zero)
    assert memory.pinned.host_bytes == 48 + (2048 - 1200) + (1024 - 800) + 24
    # shards that are only read are pinned one by one: 2 x 150 -> 512, 2 x 128 -> 256
    assert pinned_shards([300, 256], "bf16", zero, 2).host_bytes == 212
    assert pinned_shards([300], "bf16", {"stage": 3, "offload_param": {"device": "cpu"}}, 2).host_bytes == 0


def test_a_frozen_model_has_weights_alone():
    line = weights_memory(1000, "bf16", {"stage": 0}, 4)
    assert (line.device_bytes, line.host_bytes) == (2000, 0)
    line = weights_memory(1000, "bf16", {"stage": 3, "offload_param": {"device": "cpu"}}, 4)
    assert (line.device_bytes, line.host_bytes) == (0, 500)


def test_what_optimizers_keep_of_each_weight(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign", OptimizerEntry("module:name"))
    assert _states_of(ADAMW) == (2, "AdamW's moments") and _states_of("sign") == (1, "states of sign")


SHARING = [RowSharing(size, flag="--ranks_of_a_row") for size in range(9)]  # by how many ranks share a row
GPU = PlannedDevice(True, 80 * 10**9)
LONG, RANKS, LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 131_072, 8, 32, 4096, 14_336, 1024, 128_256


def estimate_of(size: int, each: tuple[float, ...]) -> Estimate:
    """The memory of 1, 2, 4 and 8 ranks a row, half of it held all the time."""
    half = int(each[(1, 2, 4, 8).index(size)] * 10**9) // 2
    moments = [Moment("low", ()), Moment("high", (MemoryLine("rows", half),))]
    return Estimate([], [MemoryLine("weights", half)], moments, GPU, lambda: None, None, [1, 2, 4, 8])


def of_gigabytes(*each: float):
    def of_ranks(size: int):
        found = estimate_of(size, each)
        return found.held, found.moments

    return of_ranks


@pytest.mark.parametrize(
    ("given", "each", "sentence"),
    [
        (1, (100, 60, 40, 30), "--ranks_of_a_row 2 is the smallest that fits: 55.9 GiB, 75% of it"),
        (8, (100, 60, 40, 30), "--ranks_of_a_row 2 is the smallest that fits: 55.9 GiB, 75% of it"),
        (2, (100, 60, 40, 30), None),
        (1, (75, 71, 40, 30), "--ranks_of_a_row 2 is the smallest that fits: 66.1 GiB, 89% of it"),
        (1, (70, 60, 40, 30), None),
        (1, (900, 500, 400, 300), "no --ranks_of_a_row up to 8 fits: 8 would still need 279.4 GiB per rank"),
    ],
)
def test_the_least_that_leaves_a_tenth_is_advised(given, each, sentence, capsys):
    assert advised_sharing(SHARING[given], [1, 2, 4, 8], of_gigabytes(*each), GPU) == sentence
    print_advice(SHARING[given], estimate_of(given, each), lambda size: estimate_of(size, each))
    assert (sentence or "") in capsys.readouterr().out


def test_nothing_is_advised_where_there_is_no_choice_or_no_known_memory():
    assert advised_sharing(SHARING[1], [1], of_gigabytes(900), GPU) is None
    assert advised_sharing(SHARING[1], [1, 2], of_gigabytes(900, 500), PlannedDevice(True)) is None


def eight_billion(key_value_heads: int = 8):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=LONG,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    keep_less(model)  # as every estimate builds it; recomputed layers keep all (`prepared`)
    return model


def planned(model, sharing: int, **more) -> PlannedModel:
    loading = ModelSettings("8b", gradient_checkpointing=True, attn_implementation="varlen", **more)
    forward = LargestForward(1, LONG, LONG, masked=True, sharing=sharing)
    return plan_training(model, forward, loading, EngineSettings("bf16", zero_stage=3), ranks=RANKS, device=GPU)


def test_an_8_billion_model_at_131072_tokens_on_8_gpus():
    """Line by line: t = 131,072 / P tokens a rank, bfloat16, ZeRO-3 over 8 ranks, recomputed by layers."""
    model, most = eight_billion(), dict[int, float]()
    weights = sum(part.numel() for part in model.parameters())
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER + 2 * HIDDEN
    assert weights == LAYERS * layer + 2 * VOCABULARY * HIDDEN + HIDDEN == 8_030_261_248
    for sharing in (1, 8):
        plan, t = planned(model, sharing), LONG // sharing
        lines = {line.name: line.device_bytes for line in (*plan.engine.held, *plan.forward)}
        # 2 bytes of a weight, 4 of its summed gradient, 12 of AdamW (moments, float32 weights): 18.1 GB a rank.
        held = [lines[name] for name in lines if "weights" in name or "gradients, " in name]
        assert sum(held) == pytest.approx(18 * weights / RANKS, rel=1e-6)
        # The layers' inputs, 2 bytes a number: 34.4 GB with P 1, 4.3 with 8.
        inputs = LAYERS * t * HIDDEN * 2
        # A layer that is recomputed, in numbers of 2 bytes a token: of each of two norms its float32 input (two), what
        # it normalises and its output; query, keys, values and output of attention; gate, up, activation and product.
        of_layer = 2 * (2 + 1 + 1) * HIDDEN + (2 * HIDDEN + 2 * KEYS) + 4 * INNER
        # Outside: the last norm's float32 input and what it normalises.
        outside = 3 * HIDDEN
        counted = inputs + 2 * t * (of_layer + outside)
        assert lines["activations, recomputed by layers"] == pytest.approx(counted, rel=2e-3)
        assert lines["gradients of activations"] == 3 * t * INNER * 2  # of the MLP's three products
        assert plan.moments[0].lines[0].device_bytes < 4.1e9  # gathered weights and the bucket
        assert lines["logits"] < 3e9  # by chunks; whole ones in float32 would be 4 * t * VOCABULARY: 67 GB with P 1
        most[sharing] = most_at_once(plan.engine.held, plan.moments)[0].device_bytes / 1e9
    assert most == pytest.approx({1: 100.2, 8: 34.4}, abs=0.1)


def test_the_least_for_an_8_billion_model_is_2():
    model = eight_billion()

    def of_ranks(size: int):
        plan = planned(model, size)
        return plan.engine.held, plan.moments

    said = advised_sharing(SHARING[1], [1, 2, 4, 8], of_ranks, GPU)
    assert said == "--ranks_of_a_row 2 is the smallest that fits: 58.3 GiB, 78% of it"
