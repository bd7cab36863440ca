"""Keys of DeepSpeed's JSON that are refused, left out or without effect, each in one sentence; and those of the
installed DeepSpeed, each of which the tables name."""

from __future__ import annotations

import json

import pytest
import torch
from deepspeed.accelerator import get_accelerator
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

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.deepspeed_json import keys
from threestep.plugins.deepspeed_json.arguments import DeepSpeedJsonArguments
from threestep.plugins.deepspeed_json.users_json import UsersJson, filled_in_keys, users_config, without_effect
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.added import added_flags
from training.utils.setup.setup import load_under


def nested(dotted: str, value: object) -> dict:
    section, _, key = dotted.rpartition(".")
    return nested(section, {key: value}) if section else {key: value}


@pytest.fixture
def final_of(tmp_path):
    """The final configuration of a user's object, or text."""

    def make(theirs, **settings):
        path = tmp_path / "ds.json"
        path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
        return engine_config(EngineSettings(own_config=UsersJson(str(path)), **settings), 2, 1000, False)

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


@pytest.mark.parametrize(
    ("theirs", "settings", "message"),
    [
        ({"timer": {}}, {}, "DeepSpeed has no key 'timer'; did you mean 'timers'"),
        ({"timers": {"throughputs": 1}}, {}, "no key 'timers.throughputs'; did you mean 'throughput'"),
        ({"comms_logger": {"verbos": 1}}, {}, "no key 'comms_logger.verbos'; did you mean 'verbose'"),
        ({"zero_optimization": {"leaf_module": {"class": 1}}}, {}, "optimization.leaf_module.class'; did you mean"),
        ({"data_types": {"grad_accum": "fp32"}}, {}, "no key 'data_types.grad_accum'; did you mean 'grad_accum_dtype'"),
        ({"timers": 1}, {}, "'timers' expects an object, got int"),
        ({"zero_optimization": {"offload_param": True}}, {}, "'zero_optimization.offload_param' expects an object"),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, {}, "size' is 'large'; DeepSpeed says: .* valid int"),
        ({"fp16": {"loss_scale": -1}}, {"dtype": "fp16"}, "'fp16.loss_scale' is -1; DeepSpeed says: .* must be >= 0"),
        ({"dump_state": 1}, {}, "'dump_state' expects true or false, got 1"),
        ({"gradient_clipping": "no"}, {}, "'gradient_clipping' expects 0 or more, got 'no'"),
        ({"steps_per_print": 0}, {}, "'steps_per_print' expects a whole number, 1 or more, got 0"),
        ({"log_level": "loud"}, {}, "'log_level' expects one of debug, info, .* got 'loud'"),
        ({"communication_data_type": "int8"}, {}, "'communication_data_type' expects one of fp32, bf16, fp16"),
        ({"zero_optimization": {"overlap_comm": True}}, {"zero_stage": 1}, "comm' expects ZeRO stage 2 or 3, got 1"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"dtype": "bf16"}, "expects bf16 with .* stage 0, got fp32"),
        ({"comms_logger": {"enabled": True}}, {}, "'comms_logger' writes nothing without \"verbose\": true"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 3}},
            {"zero_stage": 3},
            "'zero_optimization.zero_hpz_partition_size' expects a divisor of the number of ranks .2., got 3",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            {"dtype": "bf16", "zero_stage": 2},
            "'bf16.bf16_master_weights_and_grads' and 'bf16.bf16_optimizer_states' work only together",
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
    theirs = {"zero_optimization": {"max_live_parameters": 9, "prefetch_bucket_size": 3}}
    zero = final_of(theirs, zero_stage=3, zero3_live_parameters=7)["zero_optimization"]
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    assert [zero[name] for name in limits] == [9, 7, 3] and "prefetch_bucket_size" not in zero


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
    off = final_of({"dump_state": False, "comms_logger": {"enabled": False, "verbose": True}})
    assert "log_level" not in off and "comms_logger" not in off  # DeepSpeed takes the section alone for a yes
    assert final_of({"timers": {"throughput": {"enabled": True}}})["timers"]["throughput"] == {"enabled": True}


@pytest.mark.parametrize(
    ("dotted", "value", "settings", "sentence"),
    [
        ("zero_optimization.stage3_max_live_parameters", 0, {"zero_stage": 2}, "at ZeRO stage 2; it is for stage 3"),
        ("zero_optimization.reduce_bucket_size", 5, {"zero_stage": 1, "dtype": "bf16"}, "in bf16; it is for stage 1,"),
        ("zero_optimization.reduce_bucket_size", 5, {"zero_stage": 1}, ""),
        ("zero_optimization.reduce_bucket_size", "auto", {}, ""),
        ("zero_optimization.allgather_bucket_size", 2e8, {"zero_stage": 2}, "changes nothing: DeepSpeed gathers each"),
        ("bf16.immediate_grad_update", True, {"zero_stage": 2, "dtype": "bf16"}, "2; it is for stage 1 in bf16"),
        ("bf16.immediate_grad_update", True, {"zero_stage": 1, "dtype": "bf16"}, ""),
        ("gradient_clipping", 1, {}, ""),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_named(final_of, tmp_path, dotted, value, settings, sentence):
    final = final_of(nested(dotted, value), **settings)
    said = without_effect(users_config(str(tmp_path / "ds.json")), final)
    assert (len(said) == 1 and said[0].startswith(f"'{dotted}'") and sentence in said[0]) if sentence else said == []


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


def test_the_users_values_stay_and_the_rest_is_filled_in_and_named(final_of, tmp_path):
    theirs = {
        "gradient_clipping": 0.25,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 77, "contiguous_gradients": False},
    }
    final = final_of(theirs, zero_stage=2, dtype="bf16")
    assert final["gradient_clipping"] == 0.25
    assert final["train_batch_size"] == 2
    assert final["zero_optimization"]["reduce_bucket_size"] == 77
    assert final["zero_optimization"]["contiguous_gradients"] is False
    assert final["zero_optimization"]["overlap_comm"] is False
    assert final["bf16"] == {"enabled": True}
    named = filled_in_keys(users_config(str(tmp_path / "ds.json")), final)
    assert "bf16" in named and "train_batch_size" in named and "zero_optimization.overlap_comm" in named
    assert "gradient_clipping" not in named and "zero_optimization.reduce_bucket_size" not in named


def test_the_form_that_transformers_documents_is_taken(final_of):
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
        final = final_of(theirs, zero_stage=2, dtype=dtype, max_grad_norm=2.0)
        assert final["zero_optimization"]["stage"] == 2
        assert final["bf16"].get("enabled", False) is (dtype == "bf16")
        assert final["fp16"].get("enabled", False) is (dtype == "fp16")
        assert final["fp16"]["loss_scale"] == 0
        assert final["gradient_clipping"] == 2.0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"zero_optimisation": {}}, r"has no key 'zero_optimisation'; did you mean 'zero_optimization'"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "device' is nvme, which needs a compiled"),
        ({"bf16": {"check_grad_overflow": False}}, "'bf16.check_grad_overflow' is off, so a NaN gradient would reach"),
        ({"data_types": {"buffer_dtype": "bf16"}}, "'data_types.buffer_dtype' would round .* in float32, .* remove"),
        ({"zero_optimization": {"reduce_bucket": 1}}, r"has no key 'zero_optimization.reduce_bucket'; did you mean"),
        ({"bf16": {"enable": True}}, r"has no key 'bf16.enable'; did you mean 'enabled'"),
        ({"zero_optimization": 2}, "'zero_optimization' expects an object, got int"),
        ({"train_batch_size": 64}, "'train_batch_size' is set by Threestep's flags; remove it"),
        ({"managed_gradient_accumulation": True}, "'managed_gradient_accumulation' is set by Threestep's flags"),
        ({"optimizer": {"type": "Adam"}}, "'optimizer' is set by Threestep's flags"),
        ({"zero_optimization": {"stage": 3}}, "sets ZeRO stage 3, but --zero_stage is 0; make them agree"),
        ({"fp16": {"enabled": True}}, "enables fp16, but --dtype is bf16; make them agree"),
        ({"bf16": {"enabled": False}}, "disables bf16, but --dtype is bf16; make them agree"),
        ('{"a": 1,}', "is not valid JSON"),
        ('{"a": ' + "[" * 100_000, "is not valid JSON: .*recursion"),
        ("[1]", "expected an object, got list"),
    ],
)
def test_mistakes_in_the_users_json(final_of, theirs, message):
    zero_stage = 3 if "nvme" in str(theirs) else 0
    with pytest.raises(ThreestepError, match=message):
        final_of(theirs, dtype="bf16", zero_stage=zero_stage)
    assert "compile" not in final_of({"compile": {"deepcompile": False}})


def test_all_contradictions_at_once(final_of):
    theirs = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "train_batch_size": 8}
    with pytest.raises(ThreestepError, match="3 mistakes in the configuration"):
        final_of(theirs)
    with pytest.raises(ThreestepError, match="cannot read --deepspeed_config nowhere.json: No such file"):
        engine_config(EngineSettings(own_config=UsersJson("nowhere.json")), 1, 1, False)


def test_the_flag_reaches_the_settings_of_the_engine():
    given = {"deepspeed_json_DeepSpeedJsonArguments": DeepSpeedJsonArguments("x.json")}
    settings = EngineArguments().settings(1e-3, added_flags("step1_sft")(**given))
    assert settings.own_config == UsersJson("x.json") and EngineArguments().settings(1e-3).own_config is None


def test_what_the_users_json_left_out_is_said_once(tmp_path, capsys):
    get_accelerator()  # which says that it found no GPU, once a process
    capsys.readouterr()
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    settings = EngineSettings(own_config=UsersJson(str(tmp_path / "ds.json")))
    for rank in (0, 1):
        load_under(settings, Ranks(rank, rank, 2, torch.device("cpu")), lambda dtype: tiny_causal_lm("gpt2", dtype))
    said = capsys.readouterr().out
    assert (
        said.startswith(f"filled in keys missing from {tmp_path}/ds.json: ")
        and said.count("filled in keys missing from ") == 1
    )
    assert "zero_optimization" in said and "gradient_clipping" not in said
