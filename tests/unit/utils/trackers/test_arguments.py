"""--report_to names trackers that exist and are installed, before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.trackers.arguments import LogArguments, trackers_in
from training.utils.trackers.table import TRACKERS_HELP


def parsed(*words: str) -> LogArguments:
    return parse_arguments([LogArguments], words, "")[0]


def only_lacking(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """As if all trackers were installed but this one."""
    packages = ("tensorboard", "wandb", "trackio", "mlflow")
    plain = importlib.util.find_spec

    def find(name: str) -> object:
        return (name if name != missing else None) if name in packages else plain(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_no_service_is_told_unless_asked():
    assert trackers_in(vars(parsed())) == trackers_in({}) == ("tensorboard",)
    assert trackers_in(vars(parsed("--report_to", "none"))) == ()


def test_several_with_commas(monkeypatch):
    only_lacking(monkeypatch, None)
    told = parsed("--report_to", "tensorboard, wandb,mlflow,wandb")
    assert trackers_in(vars(told)) == ("tensorboard", "wandb", "mlflow")


def test_mistakes(monkeypatch):
    only_lacking(monkeypatch, "wandb")
    with pytest.raises(ThreestepError, match="--report_to wandb needs the package wandb: pip install wandb"):
        parsed("--report_to", "wandb")
    wanted = f"--report_to expects {TRACKERS_HELP}, separated by commas, or none alone, got "
    with pytest.raises(ThreestepError, match=wanted + r"'tensorbord'; did you mean 'tensorboard'\?"):
        parsed("--report_to", "tensorbord")
    with pytest.raises(ThreestepError, match=wanted + "'none'"):
        parsed("--report_to", "none,mlflow")
    with pytest.raises(ThreestepError, match=wanted + "''"):
        parsed("--report_to", "")
    with pytest.raises(ThreestepError, match="--report_to expects an existing file, got 'nowhere.py'"):
        parsed("--report_to", "tensorboard,nowhere.py:Mine")
