"""--report_to names trackers that exist and are installed, before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.plugins.plugin import TrackerEntry
from training.utils.run.trackers import TRACKERS, TRACKERS_HELP, LogArguments, trackers_in


def parsed(*words: str) -> LogArguments:
    return parse_arguments([LogArguments], words, "")[0]


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trackers more, of plugins: the package of the first is installed, that of the second is not."""
    entries = {"kept": TrackerEntry("a:Kept", "tensorboard"), "gone": TrackerEntry("a:Gone", "gone")}
    for name, entry in entries.items():
        monkeypatch.setitem(TRACKERS, name, entry)
    plain = importlib.util.find_spec
    found = {"tensorboard": True, "gone": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] if name in found else plain(name))


def test_no_service_is_told_unless_asked():
    assert trackers_in(vars(parsed())) == trackers_in({}) == ("tensorboard",)
    assert trackers_in(vars(parsed("--report_to", "none"))) == ()


def test_several_with_commas(further):
    told = parsed("--report_to", "tensorboard, kept,tensorboard")
    assert trackers_in(vars(told)) == ("tensorboard", "kept")


def test_mistakes(further):
    with pytest.raises(ThreestepError, match="--report_to gone needs the package gone: pip install gone"):
        parsed("--report_to", "gone")
    wanted = f"--report_to expects {TRACKERS_HELP}, separated by commas, or none alone, got "
    with pytest.raises(ThreestepError, match=wanted + r"'tensorbord'; did you mean 'tensorboard'\?"):
        parsed("--report_to", "tensorbord")
    with pytest.raises(ThreestepError, match=wanted + "'none'"):
        parsed("--report_to", "none,kept")
    with pytest.raises(ThreestepError, match=wanted + "''"):
        parsed("--report_to", "")
    with pytest.raises(ThreestepError, match="--report_to expects an existing file, got 'nowhere.py'"):
        parsed("--report_to", "tensorboard,nowhere.py:Mine")
