"""TensorBoard: files in OUTPUT_DIR/tensorboard. Serves `--report_to tensorboard`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from training.utils.contracts.trackers import TrackedRun, Tracker, flat_settings, sample_table
from training.utils.flags.step import Step, step_of


class TensorBoard(Tracker):
    """Scalars, a layout of the step's charts, settings, samples."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(run)
        place, done_steps = run.folder / "tensorboard", run.done_steps
        if not done_steps:
            for stale in place.glob("events.out.tfevents.*"):
                stale.unlink()  # this run's curves replace those of an earlier run in the same folder
        # TensorBoard hides what the earlier part of the run wrote from purge_step on.
        self._board = SummaryWriter(str(place), purge_step=done_steps + 1 if done_steps else None)
        self._seen: dict[str, None] = {}
        self._is_described = False

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        if not self._is_described:
            self._seen |= dict.fromkeys(metrics)
            if not all(name.startswith("eval/") for name in metrics):
                self._describe()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self.run.samples)
        for place, row in enumerate(rows):
            text = "\n\n".join(
                f"{name}: {value}" for name, value in zip(columns, row, strict=True) if value is not None
            )
            # Four spaces make it a block of plain text in Markdown, whatever a model wrote.
            self._board.add_text(f"samples/{place}", "".join(f"    {line}\n" for line in text.splitlines()), step)

    def flush(self) -> None:
        self._board.flush()

    def close(self, ended_well: bool) -> None:
        if not self._is_described and self._seen:
            self._describe()
        self._board.close()

    def _describe(self) -> None:
        """Write the layout and the settings, once the metrics' names are known."""
        from torch.utils.tensorboard.summary import hparams

        self._is_described = True
        layout = chart_layout(step_of(self.run.settings), list(self._seen))
        if layout:
            self._board.add_custom_scalars(layout)
        results = dict.fromkeys((name for name in self._seen if name.startswith("eval/")), 0.0)  # only names matter
        # add_hparams would write them to another run, apart from the curves.
        writer: Any = self._board.file_writer
        for part in hparams(flat_settings(self.run.settings), results):
            writer.add_summary(part)


def chart_layout(step: Step, names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the step's charts, with those of their metrics in `names`."""
    charts = {}
    for curve in step.figures.curves:
        present = [f"^{re.escape(name)}$" for name in curve.metrics.values() if name in names]
        if present:
            charts[curve.title] = ["Multiline", present]
    return {"Threestep": charts} if charts else {}
