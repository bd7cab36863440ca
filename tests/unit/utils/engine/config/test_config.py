"""The DeepSpeed configuration from flags."""

from __future__ import annotations

import pytest

from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.config.config import engine_config


def config_of(ranks=2, elements=1000, on_gpu=False, **settings):
    return engine_config(EngineSettings(**settings), ranks, elements, on_gpu)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_from_flags(stage, dtype):
    config = config_of(zero_stage=stage, dtype=dtype, max_grad_norm=0.5, ranks=4)
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == 0.5
    assert config.get("bf16", {}).get("enabled", False) == (dtype == "bf16")
    assert config.get("fp16", {}).get("enabled", False) == (dtype == "fp16")
    # DeepSpeed is told of one sequence a rank; accumulation and batch sizes are the planner's.
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (4, 1)
    assert config["managed_gradient_accumulation"] is False
    assert (config.get("data_types") == {"grad_accum_dtype": "fp32"}) == (dtype == "bf16" and stage > 0)


def test_buckets_are_no_larger_than_the_model():
    assert config_of(elements=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config_of(elements=10**12)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    alone, of_two, offloaded = (
        config_of(elements=1000, zero_stage=2, **given)["zero_optimization"]["reduce_bucket_size"]
        for given in ({"ranks": 1}, {}, {"ranks": 1, "offload": True})
    )
    assert (alone, of_two, offloaded) == (1, 1000, 1000)


def test_no_timer_waits_for_the_device():
    assert config_of()["timers"]["throughput"]["enabled"] is False


def test_offload():
    zero = config_of(zero_stage=2, offload=True)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False} and "offload_param" not in zero
    zero = config_of(zero_stage=3, offload=True, on_gpu=True)["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_limits_of_zero_3_are_the_flags_then_the_models():
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")

    def of(**settings):
        zero = config_of(zero_stage=3, **settings)["zero_optimization"]
        return [zero[name] for name in limits]

    assert of(zero3_live_parameters=7)[:2] == [7, 7]
    settings = EngineSettings(zero_stage=3)
    sized = engine_config(settings, 2, 10, False, limits=dict.fromkeys(limits, 5))["zero_optimization"]
    assert [sized[name] for name in limits] == [5, 5, 5]
    assert limits[0] not in config_of(zero_stage=2)["zero_optimization"]
