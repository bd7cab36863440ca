"""Flags of the ways to draw."""

from __future__ import annotations

from threestep.plugins.plan.drawing_flags import DRAWINGS, EngineLoad, WayOfDrawing, drawing_flags

DRAWN = EngineLoad(weights=400, cache=10, sequences=16, gpu=1000, heads=4)


def test_the_share_holds_a_part_of_the_weights_and_the_cache_of_a_batch():
    """400 / 2 + 16 x 10 = 360 of 1,000 bytes: 8 twentieths; in 4 batches 200 + 40: 5 of them."""
    two = WayOfDrawing("", "vllm", 2)
    assert drawing_flags(two, DRAWN, 1)["vllm_memory_share"] == 0.4
    assert drawing_flags(two, DRAWN, 4) == {
        "rollout_engine": "vllm", "per_device_generation_batch_size": 4, "generation_batches": 4,
        "vllm_tensor_parallel_size": 2, "vllm_memory_share": 0.25,
    }  # fmt: skip


def test_what_cannot_be_is_none():
    assert drawing_flags(WayOfDrawing("", "vllm", 1), DRAWN._replace(weights=900), 1) is None
    assert drawing_flags(WayOfDrawing("", "hf"), DRAWN, 3) is None


def test_the_trained_model_draws_without_flags_of_its_own():
    assert drawing_flags(DRAWINGS[-1], DRAWN, 1) == {
        "rollout_engine": "hf", "per_device_generation_batch_size": 16, "generation_batches": 1,
    }  # fmt: skip
