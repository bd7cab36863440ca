"""Calls with loaded models train them as they are; calls that were stopped go on in every form of `resume`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from tests.end_to_end.given_program import FORMS, ORDINARY
from tests.support.forked_programs import ROOT, run_python

PROGRAM = Path(__file__).with_name("given_program.py")


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """(its folder, what the program saw)"""
    place = tmp_path_factory.mktemp("given")
    save_start(place / "start")
    config = json.loads((place / "start" / "config.json").read_text())
    (place / "start" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    _untie(place / "start")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    form = ["long"] if request.config.getoption("--long") else []
    ran = run_python([str(PROGRAM), str(place), *form], environment, timeout_seconds=600)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return place, json.loads((place / "told.json").read_text())


def _untie(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["sft class", "sft hook", "dpo class", "reward hook", "ppo class", "scored hook"])
def test_an_object_is_trained_as_it_is(told, name):
    """Its losses are those of the plain model that computes the same, where a reloaded one's differ."""
    found = told[1]["given"]
    mine, plain = found[name], found[f"{name.split()[0]} plain"]
    names = [one for one in mine["figures"] if one.startswith("eval_") and one.endswith(("_before", "reward_before"))]
    for figure in ("reward_before", *names):
        if figure in plain["figures"]:
            assert mine["figures"][figure] == pytest.approx(plain["figures"][figure], rel=1e-5), figure
    first = "train/loss" if "ppo" not in name else "actor/loss"
    step, other = mine["figures"]["first"], plain["figures"]["first"]
    assert first not in step or step[first] == pytest.approx(other[first], rel=1e-5, abs=1e-7)
    assert mine["kind"] == {"class": "Halved"}.get(name.split()[1], plain["kind"])


def test_dpo_begins_at_its_own_reference(told):
    for name in ("dpo other", "dpo class", "dpo plain"):
        assert told[1]["given"][name]["figures"]["eval_loss_before"] == pytest.approx(math.log(2), abs=1e-6)


def test_what_was_given_stays_and_what_was_frozen_stays_frozen(told):
    for name, found in told[1]["given"].items():
        assert found["as it was"], name
        assert found["frozen"] and not set(found["frozen"]) & set(found["moved"]), name
        assert found["moved"], name


@pytest.mark.parametrize(
    "kind, form",
    [
        pytest.param(kind, form, marks=[] if form in ordinary else [pytest.mark.long])
        for kind, ordinary in ORDINARY.items()
        for form in FORMS
    ],
)
def test_a_stopped_call_goes_on_in_every_form(told, kind, form):
    place, seen = told
    said = seen["stopped"][f"{kind} {form}"]
    assert f"the same call with resume=True, output_dir='{place}/{kind} {form}' goes on" in said["said"]
    metrics = (place / f"{kind} unbroken" / "metrics.jsonl").read_text().splitlines()
    assert said["steps"] == [json.loads(line)["step"] for line in metrics] and max(said["steps"]) == 2
    mine, unbroken = (
        (place / f"{kind} {which}" / "model" / "model.safetensors").read_bytes() for which in (form, "unbroken")
    )
    assert mine == unbroken
