"""The table of trackers, and a user's class in place of a name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.contracts.trackers import Tracker
from training.utils.run.trackers import TRACKERS, TRACKERS_HELP, WRITTEN, check_tracker, tracker_class

BASE = "training.utils.contracts.trackers.Tracker"
OWN = f"""
from {BASE.rpartition(".")[0]} import Tracker

class Good(Tracker):
    def metrics(self, step, metrics):
        pass

class Without(Tracker):
    def metric(self, step, metrics):
        pass

class Old(Good):
    def __init__(self, folder, settings):
        pass

class Other:
    pass

text = "Good"
"""


@pytest.mark.parametrize("name", TRACKERS)
def test_every_name_has_a_class(name):
    kind = tracker_class(name)
    assert issubclass(kind, Tracker) and not kind.__abstractmethods__ and name in TRACKERS_HELP.split(", ")


def test_what_they_write_is_known():
    assert {"tracker_runs.json", "tensorboard/"} <= set(WRITTEN)


def test_the_table_loads_neither_torch_nor_a_tracker():
    program = (
        "import sys\nfrom training.utils.run.trackers import LogArguments\nLogArguments()\n"
        "loaded = {'torch', 'tensorboard', 'training.utils.run.tensorboard'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_users_class(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    address = f"{tmp_path}/own.py:Good"
    check_tracker(address)
    assert tracker_class(address).__name__ == "Good"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Goud", "--report_to: 'FILE' has no 'Goud'; did you mean 'Good'?"),
        (
            "Other",
            f"--report_to expects 'FILE:Other' to be a subclass of {BASE}, got <class '*.Other'>; build it on that",
        ),
        ("text", f"--report_to expects 'FILE:text' to be a subclass of {BASE}, got 'Good'; build it on that"),
        ("Without", "--report_to expects 'FILE:Without' to define metrics, got none; add it"),
        (
            "Old",
            "--report_to expects a function of (run), got 'FILE:Old', which takes (folder, settings): missing a "
            "required argument: 'settings'",
        ),
    ],
)
def test_mistakes_in_a_users_class(tmp_path, name, expected):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(ThreestepError) as caught:
        check_tracker(f"{path}:{name}")
    start, _, end = expected.replace("FILE", str(path)).partition("*")
    assert str(caught.value).startswith(start) and str(caught.value).endswith(end)
