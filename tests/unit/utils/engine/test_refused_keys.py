"""Keys of DeepSpeed's JSON that are refused by name."""

from __future__ import annotations

import json

import pytest

from training.utils.engine.arguments import EngineSettings
from training.utils.engine.config import deepspeed_config
from training.utils.engine.refused_keys import REFUSED, refused_keys
from training.utils.run.errors import ThreestepError


def nested(dotted: str, value: object) -> dict:
    section, _, key = dotted.rpartition(".")
    return {section: {key: value}} if section else {key: value}


@pytest.mark.parametrize("dotted", REFUSED)
def test_it_is_refused_in_one_sentence_that_says_what_to_do(dotted, tmp_path):
    path = tmp_path / "ds.json"
    value = {"enabled": True} if "." not in dotted else True
    path.write_text(json.dumps(nested(dotted, value)))
    with pytest.raises(ThreestepError) as refusal:
        deepspeed_config(EngineSettings(deepspeed_config=str(path)), 1, 10, False)
    sentence = str(refusal.value)
    assert f"'{dotted}' {REFUSED[dotted]}" in sentence
    assert "remove it" in sentence or "use --" in sentence


@pytest.mark.parametrize("off", [{"enabled": False}, {}, None, False, "auto"])
@pytest.mark.parametrize("dotted", REFUSED)
def test_switched_off_it_is_let_through(dotted, off):
    assert refused_keys(nested(dotted, off)) == []


def test_deepcompile_without_enabled_and_nvme():
    assert refused_keys({"compile": {"deepcompile": False}}) == []
    assert len(refused_keys({"compile": {"deepcompile": True}})) == 1
    assert refused_keys({"gradient_allreduce_op": "mean"}) == []
    assert len(refused_keys({"gradient_allreduce_op": "sum"})) == 1
    offload = {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"}}
    (sentence,) = refused_keys({"zero_optimization": offload})
    assert sentence.startswith("'zero_optimization.offload_param.device' is nvme, which wants a compiled operator")


@pytest.mark.parametrize(("key", "value"), [("overlap_comm", True), ("zero_hpz_partition_size", 2)])
def test_what_works_is_handed_on(key, value, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {key: value}}))
    final = deepspeed_config(EngineSettings(deepspeed_config=str(path), zero_stage=3), 2, 10, False)
    assert final["zero_optimization"][key] == value
