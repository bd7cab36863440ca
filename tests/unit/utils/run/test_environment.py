"""What a run runs on, without importing it."""

from __future__ import annotations

import importlib.metadata

import training
from training.utils.run.environment import environment_of


def test_versions_are_those_that_are_installed(monkeypatch):
    found = environment_of("1 rank on cpu")
    assert found["device"] == "1 rank on cpu" and found["versions"]["threestep"] == training.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert environment_of("x")["versions"].keys() == {"threestep", "python"}
