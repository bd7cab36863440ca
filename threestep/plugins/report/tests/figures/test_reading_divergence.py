"""A sign of divergence is a problem of its step in the report."""

from __future__ import annotations

import json

from tests.unit.utils.run.test_divergence import LOSSES, run
from threestep.plugins.report.figures.reading import read_runs
from training.utils.run.run_folder import DIVERGENCE


def test_a_sign_stands_in_the_report(tmp_path):
    run(tmp_path, len(LOSSES))
    (noted,) = [json.loads(line) for line in (tmp_path / DIVERGENCE).read_text().splitlines()]
    (step,) = read_runs([tmp_path])[0].steps
    assert step.problems == (f"step {noted['step']}: {noted['sentence']}",)
