"""The least number of ranks that must share a row; an 8-billion model at 131,072 tokens on 8 GPUs of 80 GB."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from threestep.plugins.plan.dry_run.estimate import Estimate
from threestep.plugins.plan.dry_run.plan import LargestForward, PlannedModel, plan_training
from threestep.plugins.plan.dry_run.sharing import advised_sharing, print_advice
from threestep.plugins.plan.dry_run.table import most_at_once
from threestep.plugins.speed.lean.forwards import keep_less
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
from training.utils.engine.config.arguments import EngineSettings
from training.utils.models.row_sharing import RowSharing
from training.utils.models.settings import ModelSettings

SHARING = [RowSharing(size, flag="--ranks_of_a_row") for size in range(9)]  # by how many ranks share a row
GPU = PlannedDevice(True, 80 * 10**9)
TOKENS, RANKS, LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 131_072, 8, 32, 4096, 14_336, 1024, 128_256


def of_gigabytes(*each: float):
    """The memory of 1, 2, 4 and 8 ranks a row, half of it held all the time."""
    bytes_of = {2**place: int(gigabytes * 10**9) for place, gigabytes in enumerate(each)}

    def memory_of(size: int):
        half = bytes_of[size] // 2
        return [MemoryLine("weights", half)], [Moment("low", ()), Moment("high", (MemoryLine("rows", half),))]

    return memory_of


def estimate_of(size: int, each: tuple[float, ...]) -> Estimate:
    held, moments = of_gigabytes(*each)(size)
    return Estimate([], held, moments, GPU, lambda: None, None, [1, 2, 4, 8])


@pytest.mark.parametrize(
    ("given", "each", "sentence"),
    [
        (1, (100, 60, 40, 30), "--ranks_of_a_row 2 is the least that fits: 55.9 GiB, 75% of it"),
        (8, (100, 60, 40, 30), "--ranks_of_a_row 2 is the least that fits: 55.9 GiB, 75% of it"),
        (2, (100, 60, 40, 30), None),
        (1, (75, 71, 40, 30), "--ranks_of_a_row 2 is the least that fits: 66.1 GiB, 89% of it"),
        (1, (70, 60, 40, 30), None),
        (1, (900, 500, 400, 300), "no --ranks_of_a_row up to 8 fits, which leaves 279.4 GiB on a rank"),
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
        max_position_embeddings=TOKENS,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    keep_less(model)  # as every estimate builds it; recomputed layers keep all (`prepared`)
    return model


def planned(model, sharing: int, **more) -> PlannedModel:
    loading = ModelSettings("8b", gradient_checkpointing=True, attn_implementation="varlen", **more)
    forward = LargestForward(1, TOKENS, TOKENS, masked=True, sharing=sharing)
    return plan_training(model, forward, loading, EngineSettings("bf16", zero_stage=3), ranks=RANKS, device=GPU)


def test_an_8_billion_model_at_131072_tokens_on_8_gpus():
    """Line by line: t = 131,072 / P tokens a rank, bfloat16, ZeRO-3 over 8 ranks, recomputed by layers."""
    model, most = eight_billion(), dict[int, float]()
    weights = sum(part.numel() for part in model.parameters())
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER + 2 * HIDDEN
    assert weights == LAYERS * layer + 2 * VOCABULARY * HIDDEN + HIDDEN == 8_030_261_248
    for sharing in (1, 8):
        plan, t = planned(model, sharing), TOKENS // sharing
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

    def memory_of(size: int):
        plan = planned(model, size)
        return plan.engine.held, plan.moments

    said = advised_sharing(SHARING[1], [1, 2, 4, 8], memory_of, GPU)
    assert said == "--ranks_of_a_row 2 is the least that fits: 58.3 GiB, 78% of it"
