"""A run of Trackio: on this machine, or in the space TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from threestep.plugins.report.trackers import PROJECT
from training.utils.contracts.trackers import TrackedRun, Tracker, flat_settings, sample_table


class Trackio(Tracker):
    """Figures, settings and a table of samples."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        super().__init__(run)
        self._trackio = trackio
        self.known_as = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run.known_as or run.settings.get("run_name"),
            config={"folder": run.name, **flat_settings(run.settings)},
            resume="allow" if run.known_as else "never",
            embed=False,
        ).name

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self.run.samples)
        self._trackio.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self, ended_well: bool) -> None:
        self._trackio.finish()
