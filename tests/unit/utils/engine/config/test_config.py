"""The flags of one trained engine, the DeepSpeed configuration made of them, and learning-rate schedules against their
formulas, and against transformers where it has them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from tests.support.mistakes import mistakes_of
from training.utils.engine.config.arguments import OPTIMIZERS, EngineArguments, EngineSettings
from training.utils.engine.config.config import engine_config
from training.utils.engine.config.schedules import OWN_SCHEDULES, SCHEDULES, ScheduleShape, share_of_peak
from training.utils.engine.training_engine import _scheduler
from training.utils.plugins.plugin import OptimizerEntry


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
    assert config["managed_gradient_accumulation"] is config["timers"]["throughput"]["enabled"] is False
    assert (config.get("data_types") == {"grad_accum_dtype": "fp32"}) == (dtype == "bf16" and stage > 0)


def test_buckets_are_no_larger_than_the_model():
    assert config_of(elements=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config_of(elements=10**12)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    alone, of_two, offloaded = (
        config_of(elements=1000, zero_stage=2, **given)["zero_optimization"]["reduce_bucket_size"]
        for given in ({"ranks": 1}, {}, {"ranks": 1, "offload": True})
    )
    assert (alone, of_two, offloaded) == (1, 1000, 1000)


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size expects 1 or more, got 0"),
        ({"per_device_eval_batch_size": -1}, "--per_device_eval_batch_size expects 1 or more, got -1"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps expects 1 or more, got 0"),
        ({"num_train_epochs": 0}, "--num_train_epochs expects more than 0, got 0"),
        ({"max_train_steps": 0}, "--max_train_steps expects 1 or more, got 0"),
        ({"max_tokens_per_micro_batch": 0}, "--max_tokens_per_micro_batch expects 1 or more, got 0"),
        ({"eval_interval": -1}, "--eval_interval expects 0 or more, got -1"),
        ({"num_warmup_steps": -1}, "--num_warmup_steps expects 0 or more, got -1"),
        ({"weight_decay": -0.1}, "--weight_decay expects 0 or more, got -0.1"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm expects 0 or more, got -1.0"),
        ({"zero_stage": 4}, "--zero_stage expects a number from 0 to 3, got 4"),
        ({"share_beginnings": -1}, "--share_beginnings expects 0 or more, got -1"),
        ({"min_lr_ratio": 1.5}, "--min_lr_ratio expects a number from 0 to 1, got 1.5"),
        ({"dtype": "float32"}, "--dtype expects one of fp32, bf16, fp16, got 'float32'; did you mean 'fp32'?"),
        ({"optimizer": "adam"}, "--optimizer expects one of adamw"),
        ({"lr_scheduler_type": "cosin"}, "got 'cosin'; did you mean 'cosine'"),
        ({"dtype": "fp16"}, "--dtype fp16 expects a GPU and --zero_stage 1, 2 or 3, got 0: DeepSpeed does not"),
        ({"bf16_optimizer_states": True, "dtype": "fp16", "zero_stage": 1}, "expects --dtype bf16, got fp16"),
        ({"bf16_optimizer_states": True}, "--bf16_optimizer_states expects --zero_stage 1, 2 or 3, got 0: stage 0 has"),
        ({"bf16_optimizer_states": True, "zero_stage": 2, "offload": True}, "states does not work with --offload,"),
        ({"offload": True}, "--offload expects --zero_stage 1, 2 or 3, got 0: stage 0 has nothing to offload"),
        ({"share_beginnings": 64, "padded": True}, "--share_beginnings 64 needs packed rows, but --padded has"),
        ({"zero3_live_parameters": 7}, "--zero3_live_parameters 7 limits what ZeRO-3 gathers, but no model uses"),
        ({"num_warmup_steps": 3, "warmup_ratio": 0.1}, "--num_warmup_steps 3 and --warmup_ratio 0.1 both set the"),
        ({"num_train_epochs": float("inf")}, "--num_train_epochs inf needs --max_train_steps to end the run"),
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1},
         "--min_lr_ratio 0.1 applies only to the schedules linear, cosine, wsd, but --lr_scheduler_type is constant"),
        ({"stable_ratio": 0.5}, "--stable_ratio 0.5 applies only to the schedules wsd, but --lr_scheduler_type"),
        ({"lr_scheduler_type": "inverse_sqrt", "min_lr_ratio": 0.5}, "wsd, but --lr_scheduler_type is inverse_sqrt"),
        ({"optimizer": "whole", "zero_stage": 0}, None),
        ({"optimizer": "whole", "zero_stage": 1},
         "--optimizer whole needs whole weights, but gets flat shards with --zero_stage 1; use --zero_stage 0"),
    ],
)  # fmt: skip
def test_mistakes(monkeypatch, given, said):
    monkeypatch.setitem(OPTIMIZERS, "whole", OptimizerEntry("module:name", whole_weights=True))
    found = mistakes_of(EngineArguments(**given))
    assert len(found) == (said is not None) and all(said in sentence for sentence in found)


def test_every_setting_is_passed_on():
    given = {
        "dtype": "fp32", "zero_stage": 2, "offload": True, "weight_decay": 0.1,
        "lr_scheduler_type": "wsd", "num_warmup_steps": 3, "max_grad_norm": 2.0,
        "min_lr_ratio": 0.2, "stable_ratio": 0.5,
        "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "warmup_ratio": 0.0,
        "zero3_live_parameters": 5,
    }  # fmt: skip
    assert EngineArguments(**given).settings(learning_rate=0.5) == EngineSettings(learning_rate=0.5, **given)


def shares(name: str, shape: ScheduleShape, steps: int) -> list[float]:
    return [share_of_peak(step, shape, OWN_SCHEDULES[name].after_warmup) for step in range(steps)]


def rates(settings: EngineSettings, total_steps: int, steps: int) -> list[float]:
    """As an engine steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    scheduler, found = _scheduler(optimizer, settings, total_steps), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "wsd"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_by_default_they_are_transformers_to_the_bit(name, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    if name == "constant" and warmup:  # which transformers' leaves out
        theirs = get_scheduler("constant_with_warmup", optimizer, warmup, 11)
    else:
        theirs = get_scheduler(name, optimizer, warmup, 11)
    found = rates(EngineSettings(learning_rate=3e-4, lr_scheduler_type=name, num_warmup_steps=warmup), 11, 14)
    for rate in found:
        assert rate == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(5, 5), (7, 5), (0, 1), (1, 1), (0, 0), (4, 5)])
def test_a_run_with_no_step_after_its_warmup_has_a_rate_at_each(name, warmup, total):
    """Also after the last step, when the schedule is stepped once more."""
    found = rates(EngineSettings(learning_rate=3e-4, lr_scheduler_type=name, num_warmup_steps=warmup), total, total + 1)
    assert all(math.isfinite(rate) and 0.0 <= rate <= 3e-4 for rate in found)
    if name != "constant":
        assert found[: min(warmup, total)] == pytest.approx([3e-4 * n / warmup for n in range(min(warmup, total))])


def test_by_hand():
    """Two steps of warm-up: 0, 0.5. Four more with a floor of 0.1: linear 1, 0.775, 0.55, 0.325 and 0.1; the
    cosine's (1 + cos(pi t / 4)) / 2 is 1, 0.8536, 0.5, 0.1464, 0. wsd
    with half of them stable: 1, 1, then (1 + cos(pi / 2)) / 2."""
    shape = ScheduleShape(warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    assert shares("linear", shape, 8) == pytest.approx([0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])
    assert shares("constant", ScheduleShape(2, 6), 4) == pytest.approx([0.0, 0.5, 1.0, 1.0])
    wave = [0.1 + 0.9 * value for value in (1.0, 0.853553, 0.5, 0.146447, 0.0)]
    assert shares("cosine", shape, 7) == pytest.approx([0.0, 0.5, *wave], abs=1e-6)
    half = ScheduleShape(2, 6, min_lr_ratio=0.1, stable_ratio=0.5)
    assert shares("wsd", half, 8) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_the_engine_takes_its_settings():
    shape = {"num_warmup_steps": 2, "min_lr_ratio": 0.1, "stable_ratio": 0.5}
    settings = EngineSettings(learning_rate=2.0, lr_scheduler_type="wsd", **shape)
    assert rates(settings, 6, 8) == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0, 1.1, 0.2, 0.2])
    state = _scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), settings, 6).state_dict()
    assert state["lr_lambdas"] == [{}]  # a resumed run takes the schedule of its own settings
