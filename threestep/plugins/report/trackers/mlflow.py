"""A run of MLflow, at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from threestep.plugins.report.trackers import PROJECT
from training.utils.contracts.trackers import TrackedRun, Tracker, flat_settings, sample_table


class MLflow(Tracker):
    """Figures, settings and a table of samples for each evaluation."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        super().__init__(run)
        self._mlflow = mlflow
        known = run.known_as
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        started = mlflow.start_run(run_id=known, run_name=None if known else run.name, log_system_metrics=False)
        self.known_as = started.info.run_id
        params = list(flat_settings(run.settings).items()) if known is None else []
        for start in range(0, len(params), 100):  # the most that one request may hold
            mlflow.log_params({name: str(value)[:6000] for name, value in params[start : start + 100]})

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # Its databases cannot store infinity.
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self.run.samples)
        table = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
        self._mlflow.log_table(table, f"samples/step_{step:06d}.json")

    def close(self, ended_well: bool) -> None:
        self._mlflow.end_run("FINISHED" if ended_well else "FAILED")
