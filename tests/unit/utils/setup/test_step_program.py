"""A step's program trains, or does what a plugin's flag asks for in its place; a plugin may choose for `auto`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from training.utils.base.machine import PlannedDevice
from training.utils.flags import added as added_flags
from training.utils.flags.flags import AutoChoice
from training.utils.plugins.plugin import InPlaceOfRun
from training.utils.setup import flags as setup_flags
from training.utils.setup.flags import CheckedStep, chosen_by_plugin
from training.utils.setup.step_program import StepProgram

pytestmark = pytest.mark.unit

DONE: list[Any] = []


def shown(step: CheckedStep) -> None:
    DONE.append(("shown", step))


def seven(step: CheckedStep, device: PlannedDevice) -> AutoChoice:
    return AutoChoice("sequences", 7, f"{step.scores} {device.is_cuda}")


@pytest.mark.parametrize(("settings", "does"), [({"show": True}, "shown"), ({"show": False}, "run"), ({}, "run")])
def test_a_switch_of_a_plugin_takes_the_place_of_the_run(monkeypatch, settings, does):
    tables = {"in_place_of_run": {"show": InPlaceOfRun(f"{__name__}:shown", "shows", "")}}
    monkeypatch.setattr(added_flags, "added", lambda table, known: tables[table])
    monkeypatch.setattr(__name__ + ".DONE", [])
    step, given = CheckedStep(SimpleNamespace(settings=settings)), list[Any]()
    program = StepProgram(lambda argv: given.append(argv) or step, lambda step: DONE.append(("run", step)))
    program(["--show"])
    assert given == [["--show"]] and DONE == [(does, step)]


def test_a_plugin_chooses_what_auto_stands_for(monkeypatch):
    tables = {"auto_choices": {"sequences": f"{__name__}:seven"}}
    monkeypatch.setattr(setup_flags, "added", lambda table, known: tables[table])
    step, device = CheckedStep(None, scores=True), PlannedDevice(False)
    assert chosen_by_plugin("sequences", step, device) == AutoChoice("sequences", 7, "True False")
    assert chosen_by_plugin("rows", step, device) is None
