"""The user's JSON: what is missing is filled in and named, mistakes are named."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.deepspeed_json.arguments import DeepSpeedJsonArguments
from threestep.plugins.deepspeed_json.users_json import UsersJson, filled_in_keys, users_config
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.added import added_flags
from training.utils.setup.setup import load_under


@pytest.fixture
def config_of(tmp_path):
    """The final configuration for a user's JSON (an object, or text) and settings."""

    def make(theirs, **settings):
        path = tmp_path / "ds.json"
        path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
        return engine_config(EngineSettings(own_config=UsersJson(str(path)), **settings), 2, 1000, False)

    return make


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
        engine_config(EngineSettings(own_config=UsersJson("nowhere.json")), 1, 1, False)


def test_what_deepspeed_tells_by_a_timer_is_asked_for(config_of):
    asked = config_of({"timers": {"throughput": {"enabled": True}}})
    assert asked["timers"]["throughput"] == {"enabled": True}


def test_limits_of_zero_3_are_the_users_then_the_flags(config_of):
    theirs = {"zero_optimization": {"max_live_parameters": 9, "prefetch_bucket_size": 3}}
    zero = config_of(theirs, zero_stage=3, zero3_live_parameters=7)["zero_optimization"]
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    assert [zero[name] for name in limits] == [9, 7, 3]


def test_the_flag_reaches_the_settings_of_the_engine():
    given = {"deepspeed_json_DeepSpeedJsonArguments": DeepSpeedJsonArguments("x.json")}
    settings = EngineArguments().settings(1e-3, added_flags("step1_sft")(**given))
    assert settings.own_config == UsersJson("x.json") and EngineArguments().settings(1e-3).own_config is None


def test_what_the_users_json_left_out_is_said_once(tmp_path, capsys):
    from deepspeed.accelerator import get_accelerator

    get_accelerator()  # which says that it found no GPU, once a process
    capsys.readouterr()
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    settings = EngineSettings(own_config=UsersJson(str(tmp_path / "ds.json")))
    for rank in (0, 1):
        load_under(settings, Ranks(rank, rank, 2, torch.device("cpu")), lambda dtype: tiny_causal_lm("gpt2", dtype))
    said = capsys.readouterr().out
    assert said.startswith(f"filled in the keys that {tmp_path}/ds.json lacks: ") and said.count("filled in") == 1
    assert "zero_optimization" in said and "gradient_clipping" not in said
