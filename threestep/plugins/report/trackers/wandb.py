"""A run of Weights & Biases, which reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from threestep.plugins.report.trackers import PROJECT
from training.utils.contracts.trackers import TrackedRun, Tracker, sample_table


class WeightsAndBiases(Tracker):
    """Figures, settings and a table of samples."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        super().__init__(run)
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            id=run.known_as,
            resume="allow" if run.known_as is not None else None,
        )
        self.known_as = self._run.id
        # W&B's step axis cannot go back, as a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self.run.samples)
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=rows)})

    def close(self, ended_well: bool) -> None:
        self._run.finish(exit_code=0 if ended_well else 1)
