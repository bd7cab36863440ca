"""The DeepSpeed configuration: from flags, and from the user's JSON with what is missing filled in."""

from __future__ import annotations

import json

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.config.config import deepspeed_config
from training.utils.engine.config.deepspeed_json import filled_in_keys, users_config


@pytest.fixture
def config_of(tmp_path):
    """The final configuration for a user's JSON (an object, or text) and settings."""

    def make(theirs=None, ranks=2, elements=1000, on_gpu=False, **settings):
        if theirs is not None:
            path = tmp_path / "ds.json"
            path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
            settings["deepspeed_config"] = str(path)
        return deepspeed_config(EngineSettings(**settings), ranks, elements, on_gpu)

    return make


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_from_flags(config_of, stage, dtype):
    config = config_of(zero_stage=stage, dtype=dtype, max_grad_norm=0.5, ranks=4)
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == 0.5
    assert config.get("bf16", {}).get("enabled", False) == (dtype == "bf16")
    assert config.get("fp16", {}).get("enabled", False) == (dtype == "fp16")
    # DeepSpeed is told of one sequence a rank; accumulation and batch sizes are the planner's.
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (4, 1)
    assert config["managed_gradient_accumulation"] is False
    assert (config.get("data_types") == {"grad_accum_dtype": "fp32"}) == (dtype == "bf16" and stage > 0)


def test_buckets_are_no_larger_than_the_model(config_of):
    assert config_of(elements=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config_of(elements=10**12)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    alone, of_two, offloaded = (
        config_of(elements=1000, zero_stage=2, **given)["zero_optimization"]["reduce_bucket_size"]
        for given in ({"ranks": 1}, {}, {"ranks": 1, "offload": True})
    )
    assert (alone, of_two, offloaded) == (1, 1000, 1000)


def test_no_timer_waits_for_the_device_unless_asked(config_of):
    assert config_of()["timers"]["throughput"]["enabled"] is False
    asked = config_of({"timers": {"throughput": {"enabled": True}}})
    assert asked["timers"]["throughput"] == {"enabled": True}


def test_offload(config_of):
    zero = config_of(zero_stage=2, offload=True)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False} and "offload_param" not in zero
    zero = config_of(zero_stage=3, offload=True, on_gpu=True)["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_limits_of_zero_3_are_the_users_then_the_models(config_of):
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")

    def of(**settings):
        zero = config_of(zero_stage=3, **settings)["zero_optimization"]
        return [zero[name] for name in limits]

    assert of(zero3_live_parameters=7)[:2] == [7, 7]
    theirs = {"zero_optimization": {"max_live_parameters": 9, "prefetch_bucket_size": 3}}
    assert of(theirs=theirs, zero3_live_parameters=7) == [9, 7, 3]
    settings = EngineSettings(zero_stage=3)
    sized = deepspeed_config(settings, 2, 10, False, limits=dict.fromkeys(limits, 5))["zero_optimization"]
    assert [sized[name] for name in limits] == [5, 5, 5]
    assert limits[0] not in config_of(zero_stage=2)["zero_optimization"]


def test_the_users_values_stay_and_the_rest_is_filled_in_and_named(config_of, tmp_path):
    theirs = {
        "gradient_clipping": 0.25,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 77, "contiguous_gradients": False},
    }
    final = config_of(theirs, zero_stage=2, dtype="bf16")
    assert final["gradient_clipping"] == 0.25
    assert final["train_batch_size"] == 2
    assert final["zero_optimization"]["reduce_bucket_size"] == 77
    assert final["zero_optimization"]["contiguous_gradients"] is False
    assert final["zero_optimization"]["overlap_comm"] is False
    assert final["bf16"] == {"enabled": True}
    named = filled_in_keys(users_config(str(tmp_path / "ds.json")), final)
    assert "bf16" in named and "train_batch_size" in named and "zero_optimization.overlap_comm" in named
    assert "gradient_clipping" not in named and "zero_optimization.reduce_bucket_size" not in named


def test_the_form_that_transformers_documents_is_taken(config_of):
    """Everything "auto", sections for both precisions: what users of the Trainer have on disk."""
    theirs = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "overlap_comm": True, "reduce_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    for dtype in ("fp32", "bf16", "fp16"):
        final = config_of(theirs, zero_stage=2, dtype=dtype, max_grad_norm=2.0)
        assert final["zero_optimization"]["stage"] == 2
        assert final["bf16"].get("enabled", False) is (dtype == "bf16")
        assert final["fp16"].get("enabled", False) is (dtype == "fp16")
        assert final["fp16"]["loss_scale"] == 0
        assert final["gradient_clipping"] == 2.0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"zero_optimisation": {}}, r"has no key 'zero_optimisation'; did you mean 'zero_optimization'"),
        (
            {"bf16": {"check_grad_overflow": False}},
            "'bf16.check_grad_overflow' is off, so a NaN gradient would reach the weights",
        ),
        (
            {"data_types": {"buffer_dtype": "bf16"}},
            "'data_types.buffer_dtype' would round what the model computes in float32, .* remove it",
        ),
        ({"zero_optimization": {"reduce_bucket": 1}}, r"has no key 'zero_optimization.reduce_bucket'; did you mean"),
        ({"bf16": {"enable": True}}, r"has no key 'bf16.enable'; did you mean 'enabled'"),
        ({"zero_optimization": 2}, "'zero_optimization' expects an object, got a int"),
        ({"train_batch_size": 64}, "'train_batch_size' is set by Threestep's flags; remove it"),
        ({"managed_gradient_accumulation": True}, "'managed_gradient_accumulation' is set by Threestep's flags"),
        ({"optimizer": {"type": "Adam"}}, "'optimizer' is set by Threestep's flags"),
        ({"zero_optimization": {"stage": 3}}, "sets ZeRO stage 3 and --zero_stage is 0; make them agree"),
        ({"fp16": {"enabled": True}}, "enables fp16 and --dtype is bf16; make them agree"),
        ({"bf16": {"enabled": False}}, "disables bf16 and --dtype is bf16; make them agree"),
        ('{"a": 1,}', "is not valid JSON"),
        ('{"a": ' + "[" * 100_000, "is not valid JSON: .*recursion"),
        ("[1]", "expected an object, got a list"),
    ],
)
def test_mistakes_in_the_users_json(config_of, theirs, message):
    with pytest.raises(ThreestepError, match=message):
        config_of(theirs, dtype="bf16")


def test_all_contradictions_at_once(config_of):
    theirs = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "train_batch_size": 8}
    with pytest.raises(ThreestepError, match="3 mistakes in the configuration"):
        config_of(theirs)


def test_a_json_that_is_not_there():
    with pytest.raises(ThreestepError, match="cannot read --deepspeed_config nowhere.json: No such file"):
        deepspeed_config(EngineSettings(deepspeed_config="nowhere.json"), 1, 1, False)
