"""Calls with loaded models train what their folder does; calls that were stopped go on in every form of `resume`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from tests.end_to_end.given_program import FORMS, ORDINARY
from tests.support.forked_programs import ON_CPU, run_python

PROGRAM = Path(__file__).with_name("given_program.py")


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """(its folder, what the program saw)"""
    place = tmp_path_factory.mktemp("given")
    save_start(place / "start")
    form = ["long"] if request.config.getoption("--long") else []
    ran = run_python([str(PROGRAM), str(place), *form], {**os.environ, **ON_CPU}, timeout_seconds=600)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return place, json.loads((place / "told.json").read_text())


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "ppo"])
def test_an_object_is_trained_as_its_folder(told, kind):
    assert told[1]["same"][kind]


def test_what_was_given_stays_and_what_was_frozen_stays_frozen(told):
    """In shards, on other ranks and behind a resume too."""
    for name, found in told[1]["given"].items():
        assert found["as it was"], name
        assert found["frozen"] and not set(found["frozen"]) & set(found["moved"]), name
        assert found["moved"], name
        assert found["steps"][-1] == 2, name


def test_a_class_of_ones_own_is_trained_from_a_folder_with_its_code(told):
    found = told[1]["with code"]
    assert "its class is halved.Halved" in found["said"]
    assert "give that folder with trust_remote_code=True" in found["said"]
    assert (found["kind"], found["half"]) == ("Halved", True)


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
