"""What a training run writes beside its metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from training.utils.contracts.run import EvaluationObserver
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import RunFolder
from training.utils.setup.training_run import TrainingRun


def test_the_main_rank_writes_lines_with_their_step_and_trackers_hear_of_them(tmp_path):
    heard: list = []

    class Tracker:
        def samples(self, step, samples):
            heard.append((step, list(samples)))

        def close(self, ended_well):
            pass

    class Observer(EvaluationObserver):
        def scored(self, scores):
            return [{"prompt": name} for name in scores.values()]

        def samples(self, step, samples):
            heard.append((step, list(samples)))

    nothing: Any = SimpleNamespace()
    settings: Any = SimpleNamespace(evaluation_observer=Observer())
    for is_main in (True, False):
        with MetricsWriter(tmp_path, is_main, trackers=[Tracker()] if is_main else []) as metrics:
            run = TrainingRun(nothing, [], [], settings, metrics, folder=RunFolder(tmp_path, is_main))
            run.write_samples(3, {0: "a", 1: "ü"})
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 3, "prompt": "a"}, {"step": 3, "prompt": "ü"}]
    assert heard == [(3, lines)] * 3  # the tracker of the main rank, and the observer of each
