"""The device that is planned for, and what is said of its memory."""

from __future__ import annotations

import pytest
import torch

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.dry_run.device import planned_device, verdict
from training.utils.base.machine import PlannedDevice


@pytest.mark.parametrize(
    ("kind", "gigabytes", "expected"),
    [
        (None, None, PlannedDevice(False)),
        ("cpu", None, PlannedDevice(False)),
        ("cuda", None, PlannedDevice(True)),
        ("cuda", 80.0, PlannedDevice(True, 80_000_000_000)),
        (None, 24.0, PlannedDevice(True, 24_000_000_000)),
    ],
)
def test_without_a_gpu_the_flags_say_what_is_planned(monkeypatch, kind, gigabytes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device(DryRunArguments(True, kind, gigabytes)) == expected


@pytest.mark.parametrize(
    ("most", "words"), [(50, "this fits a GPU"), (95, "this hardly fits a GPU"), (101, "this does not fit a GPU")]
)
def test_the_verdict_leaves_a_tenth_to_cuda(most, words):
    sentence = verdict(PlannedDevice(True, 100 * 10**9), most * 10**9)
    assert sentence.startswith(words) and "100 GB (93.1 GiB)" in sentence and f"{most}% of it" in sentence


def test_nothing_is_said_of_a_memory_that_is_unknown():
    assert verdict(PlannedDevice(False), 10**15) is None
