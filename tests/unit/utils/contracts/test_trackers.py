"""A tracked run's name."""

from __future__ import annotations

from training.utils.contracts.trackers import TrackedRun


def test_a_run_with_a_name_has_it_in_place_of_its_folder(tmp_path):
    assert TrackedRun(tmp_path / "quickstart" / "step1_sft", {"run_name": None}, 8).name == "quickstart/step1_sft"
    assert TrackedRun(tmp_path, {"run_name": "mine"}, 8).name == "mine"
