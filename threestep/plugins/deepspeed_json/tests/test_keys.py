"""Keys of DeepSpeed's JSON that are refused, left out or without effect, each in one sentence; and those of the
installed DeepSpeed, each of which the tables name."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.deepspeed_json import keys
from threestep.plugins.deepspeed_json.users_json import UsersJson, users_config, without_effect
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.config.config import engine_config


def nested(dotted: str, value: object) -> dict:
    section, _, key = dotted.rpartition(".")
    return nested(section, {key: value}) if section else {key: value}


@pytest.fixture
def final_of(tmp_path):
    """The final configuration of a user's object."""

    def make(theirs, ranks=2, **settings):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(theirs))
        return engine_config(EngineSettings(own_config=UsersJson(str(path)), **settings), ranks, 10, False)

    return make


def asking(dotted: str) -> object:
    """A value of a refused key that asks for something."""
    if not keys.is_off(dotted, {"enabled": True}) and "." not in dotted and dotted not in keys._DEFAULTS:
        return {"enabled": True}
    return next(value for value in (True, False, 7) if not keys.is_off(dotted, value))


@pytest.mark.parametrize("dotted", keys.REFUSED)
def test_it_is_refused_in_one_sentence_that_says_what_to_do(dotted, final_of):
    with pytest.raises(ThreestepError) as refusal:
        final_of(nested(dotted, asking(dotted)))
    sentence = str(refusal.value)
    assert f"'{dotted}' {keys.REFUSED[dotted]}" in sentence and "\n" not in sentence
    assert "remove it" in sentence or "use --" in sentence


@pytest.mark.parametrize("dotted", keys.REFUSED)
def test_switched_off_it_is_taken_and_deepspeed_never_sees_it(dotted, final_of):
    """DeepSpeed itself refuses some of them even so."""
    for value in ({"enabled": False}, {}, None, "auto", keys._DEFAULTS.get(dotted, False)):
        final = final_of(nested(dotted, value))
        for name in dotted.split("."):
            final = final.get(name, {})
        assert final == {}, value


def test_deepcompile_without_enabled_and_nvme(final_of):
    assert "compile" not in final_of({"compile": {"deepcompile": False}})
    with pytest.raises(ThreestepError, match="DeepCompile"):
        final_of({"compile": {"deepcompile": True}})
    with pytest.raises(
        ThreestepError, match="'zero_optimization.offload_param.device' is nvme, which wants a compiled"
    ):
        final_of({"zero_optimization": {"offload_param": {"device": "nvme"}}}, zero_stage=3)


@pytest.mark.parametrize(
    ("theirs", "settings", "message"),
    [
        ({"timer": {}}, {}, "DeepSpeed has no key 'timer'; did you mean 'timers'"),
        ({"timers": {"throughputs": 1}}, {}, "no key 'timers.throughputs'; did you mean 'throughput'"),
        ({"comms_logger": {"verbos": 1}}, {}, "no key 'comms_logger.verbos'; did you mean 'verbose'"),
        ({"zero_optimization": {"leaf_module": {"class": 1}}}, {}, "optimization.leaf_module.class'; did you mean"),
        ({"data_types": {"grad_accum": "fp32"}}, {}, "no key 'data_types.grad_accum'; did you mean 'grad_accum_dtype'"),
        ({"timers": 1}, {}, "'timers' expects an object, got a int"),
        ({"zero_optimization": {"offload_param": True}}, {}, "'zero_optimization.offload_param' expects an object"),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            {},
            "'zero_optimization.reduce_bucket_size' is 'large'; DeepSpeed says: Input should be a valid integer",
        ),
        ({"fp16": {"loss_scale": -1}}, {"dtype": "fp16"}, "'fp16.loss_scale' is -1; DeepSpeed says: .* must be >= 0"),
        ({"dump_state": 1}, {}, "'dump_state' expects true or false, got 1"),
        ({"gradient_clipping": "no"}, {}, "'gradient_clipping' expects 0 or more, got 'no'"),
        ({"steps_per_print": 0}, {}, "'steps_per_print' expects a whole number from 1 on, got 0"),
        ({"log_level": "loud"}, {}, "'log_level' expects one of debug, info, .* got 'loud'"),
        ({"communication_data_type": "int8"}, {}, "'communication_data_type' expects one of fp32, bf16, fp16"),
        (
            {"zero_optimization": {"overlap_comm": True}},
            {"zero_stage": 1},
            "'zero_optimization.overlap_comm' expects ZeRO stage 2 or 3, got 1",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            {"dtype": "bf16"},
            "'data_types.grad_accum_dtype' expects bf16 under --dtype bf16 and ZeRO stage 0, got fp32",
        ),
        ({"comms_logger": {"enabled": True}}, {}, "'comms_logger' writes nothing without \"verbose\": true"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 3}},
            {"zero_stage": 3},
            "'zero_optimization.zero_hpz_partition_size' expects a divisor of the 2 rank",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            {"dtype": "bf16", "zero_stage": 2},
            "'bf16.bf16_master_weights_and_grads' and 'bf16.bf16_optimizer_states' are honoured together alone",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"dtype": "bf16", "zero_stage": 1},
            "'bf16.bf16_master_weights_and_grads' expects ZeRO stage 2 or 3, or stage 1 with",
        ),
    ],
)  # fmt: skip
def test_mistakes(final_of, theirs, settings, message):
    with pytest.raises(ThreestepError, match=message):
        final_of(theirs, **settings)


def test_a_key_under_its_other_name_stands_before_the_flags(final_of):
    """DeepSpeed would take ours, which has the first name."""
    zero = final_of({"zero_optimization": {"prefetch_bucket_size": 5}}, zero_stage=3)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 5 and "prefetch_bucket_size" not in zero


def test_auto_is_filled_in_or_left_out(final_of):
    """DeepSpeed takes the word in its models alone."""
    theirs = {"communication_data_type": "auto", "wall_clock_breakdown": "auto", "steps_per_print": None}
    final = final_of({**theirs, "zero_optimization": {"stage3_max_live_parameters": "auto", "stage": "auto"}})
    assert "communication_data_type" not in final and final["wall_clock_breakdown"] is False
    assert final["steps_per_print"] == 2**31 - 1 and final["zero_optimization"]["stage"] == 0
    assert "stage3_max_live_parameters" not in final["zero_optimization"]


@pytest.mark.parametrize(
    "theirs", [{"steps_per_print": 5}, {"dump_state": True}, {"comms_logger": {"enabled": True, "verbose": True}}]
)
def test_what_deepspeed_tells_is_not_silenced(final_of, theirs):
    assert final_of(theirs)["log_level"] == "info"
    assert final_of({**theirs, "log_level": "warning"})["log_level"] == "warning"
    assert "log_level" not in final_of({"dump_state": False, "comms_logger": {"enabled": False}})


@pytest.mark.parametrize(
    ("dotted", "value", "settings", "sentence"),
    [
        ("zero_optimization.stage3_max_live_parameters", 0, {"zero_stage": 2}, "changes nothing at ZeRO stage 2; of 3"),
        ("zero_optimization.reduce_bucket_size", 5, {"zero_stage": 1, "dtype": "bf16"}, "stage 1 in bf16; of 1,"),
        ("zero_optimization.reduce_bucket_size", 5, {"zero_stage": 1}, ""),
        ("zero_optimization.reduce_bucket_size", "auto", {}, ""),
        ("zero_optimization.allgather_bucket_size", 2e8, {"zero_stage": 2}, "changes nothing: DeepSpeed gathers each"),
        ("bf16.immediate_grad_update", True, {"zero_stage": 2, "dtype": "bf16"}, "at ZeRO stage 2; of 1 in bf16"),
        ("bf16.immediate_grad_update", True, {"zero_stage": 1, "dtype": "bf16"}, ""),
        ("gradient_clipping", 1, {}, ""),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_named(final_of, tmp_path, dotted, value, settings, sentence):
    final = final_of(nested(dotted, value), **settings)
    said = without_effect(users_config(str(tmp_path / "ds.json")), final)
    assert (len(said) == 1 and said[0].startswith(f"'{dotted}'") and sentence in said[0]) if sentence else said == []


def test_a_logger_that_is_off_stays_off(final_of):
    """DeepSpeed takes the section alone for a yes."""
    assert "comms_logger" not in final_of({"comms_logger": {"enabled": False, "verbose": True}})


class Asked(dict):
    """A configuration that notes which keys are looked for."""

    def __init__(self, values: dict, found: set[str]):
        super().__init__(values)
        self.found = found

    def get(self, key, default=None):
        self.found.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.found.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.found.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # `key in config.keys()`

    def __copy__(self):
        return self


def test_every_key_of_the_installed_deepspeed_is_in_one_table():
    """A key of a new version is neither accepted nor refused until somebody looks at it."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    top: set[str] = set()
    data_types: set[str] = set()
    config = Asked({"train_micro_batch_size_per_gpu": 1, "data_types": Asked({}, data_types)}, top)
    DeepSpeedConfig(config)
    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }
    found = {name for name in top if isinstance(name, str)} | {f"data_types.{name}" for name in data_types}
    for section, model in models.items():
        for name, field in model.model_fields.items():
            found |= {f"{section}.{word}" for word in (name, field.alias) if word}
    tables = (keys.ACCEPTED, keys.REFUSED, keys.LEFT_OUT, keys.OWNED, keys.ALIASES, keys.sections())
    assert len(found) > 130
    assert sorted(name for name in found if not any(name in table for table in tables)) == []
    assert sorted(set(keys.ACCEPTED) - found) == []
    named = [name for table in tables[:4] for name in table]
    assert len(named) == len(set(named))
