"""Trackers that receive a run's metrics: TensorBoard, Weights & Biases, Trackio, MLflow.

Each is made from a folder and the settings, and imports its package then. Only the MetricsWriter calls them, on rank 0.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object
from training.utils.flags.step import Step, step_of
from training.utils.report.arguments import ReportArguments
from training.utils.run.metrics import Tracker

PROJECT = "threestep"
_IDS = "tracker_runs.json"  # in the run's folder: the services' names for the run, for resuming
_COLUMNS = (
    "prompt", "sample", "response", "responses", "ground_truth", "reward", "scores", "margin", "loss", "check",
    "response_tokens", "ended", "uid",
)  # fmt: skip


def open_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], done_steps: int) -> list[Tracker]:
    """Open the trackers `names`. done_steps: of a resumed run, which continues under the same name in each service.

    ThreestepError if one cannot be opened: better now than after days of training that it did not record.
    """
    if not done_steps:
        (folder / _IDS).unlink(missing_ok=True)  # an earlier run's in the same folder
    ids = read_json_object(str(folder / _IDS)) or {}
    made: list[Tracker] = []
    for name in names:
        try:
            made.append(TRACKERS[name](folder, settings, done_steps, ids))
        except Exception as problem:  # (each package has its exceptions)
            raise ThreestepError(
                f"--report_to {name}: it cannot be opened ({type(problem).__name__}: "
                f"{' '.join(str(problem).split())}); set it up as its documentation says, or leave it out"
            ) from problem
    if ids:
        (folder / _IDS).write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return made


class TensorBoard(Tracker):
    """Files in OUTPUT_DIR/tensorboard: scalars, a layout of the report's charts, settings, samples."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not done_steps:
            for stale in (folder / "tensorboard").glob("events.out.tfevents.*"):
                stale.unlink()  # this run's curves replace those of an earlier run in the same folder
        # TensorBoard hides what the earlier part of the run wrote from purge_step on.
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1 if done_steps else None)
        self._settings, self._most = settings, shown_samples(settings)
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
        columns, rows = sample_table(samples, self._most)
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
        layout = chart_layout(step_of(self._settings), list(self._seen))
        if layout:
            self._board.add_custom_scalars(layout)
        results = dict.fromkeys((name for name in self._seen if name.startswith("eval/")), 0.0)  # only names matter
        # add_hparams would write them to another run, apart from the curves.
        writer: Any = self._board.file_writer
        for part in hparams(_flat(self._settings), results):
            writer.add_summary(part)


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, which reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and others."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import wandb

        self._wandb, self._most = wandb, shown_samples(settings)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run_name(folder, settings),
            dir=str(folder),
            config=dict(settings),
            id=ids.get("wandb"),
            resume="allow" if "wandb" in ids else None,
        )
        ids["wandb"] = self._run.id
        # W&B's step axis cannot go back, as a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self._most)
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=rows)})

    def close(self, ended_well: bool) -> None:
        self._run.finish(exit_code=0 if ended_well else 1)


class Trackio(Tracker):
    """A run of Trackio: on this machine, or in the space TRACKIO_SPACE_ID."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import trackio

        self._trackio, self._most = trackio, shown_samples(settings)
        known = ids.get("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=known or settings.get("run_name"),
            config={"folder": run_name(folder, settings), **_flat(settings)},
            resume="allow" if known else "never",
            embed=False,
        )
        ids["trackio"] = self._run.name

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self._most)
        self._trackio.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self, ended_well: bool) -> None:
        self._trackio.finish()


class MLflow(Tracker):
    """A run of MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import mlflow

        self._mlflow, self._most = mlflow, shown_samples(settings)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        known = ids.get("mlflow")
        run = mlflow.start_run(
            run_id=known, run_name=None if known else run_name(folder, settings), log_system_metrics=False
        )
        ids["mlflow"] = run.info.run_id
        params = list(_flat(settings).items()) if known is None else []
        for start in range(0, len(params), 100):  # the most that one request may hold
            mlflow.log_params({name: str(value)[:6000] for name, value in params[start : start + 100]})

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # Its databases cannot store infinity.
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(samples, self._most)
        table = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
        self._mlflow.log_table(table, f"samples/step_{step:06d}.json")

    def close(self, ended_well: bool) -> None:
        self._mlflow.end_run("FINISHED" if ended_well else "FAILED")


_Opener = Callable[[Path, Mapping[str, Any], int, dict[str, str]], Tracker]
TRACKERS: dict[str, _Opener] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def chart_layout(step: Step, names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the step's charts in the report, with those of their metrics in `names`."""
    charts = {}
    for curve in step.curves:
        present = [f"^{re.escape(name)}$" for name in curve.metrics.values() if name in names]
        if present:
            charts[curve.title] = ["Multiline", present]
    return {"Threestep": charts} if charts else {}


def run_name(folder: Path, settings: Mapping[str, Any]) -> str:
    """--run_name, or else the folder with its parent's name, e.g. quickstart/step1_sft."""
    if settings.get("run_name"):
        return str(settings["run_name"])
    return "/".join(folder.resolve().parts[-2:]).lstrip("/")


def shown_samples(settings: Mapping[str, Any]) -> int:
    """Number of samples of an evaluation that a tracker gets."""
    return int(settings.get("report_samples", ReportArguments.report_samples))


def sample_table(samples: Sequence[Mapping[str, Any]], most: int) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of the first `most` samples: of those columns that any of them has, then each reward and
    what it returned. Prompts come in the same order in every evaluation. What is neither number nor text is JSON."""
    shown = samples[:most]
    values = dict.fromkeys(name for sample in shown for name in sample if name.startswith(("reward/", "check/")))
    columns = [*(name for name in _COLUMNS if any(name in sample for sample in shown)), *values]
    return columns, [[_cell(sample.get(name)) for name in columns] for sample in shown]


def _cell(value: Any) -> Any:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else json.dumps(value, ensure_ascii=False, default=str)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as trackers accept them: numbers, booleans and texts."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
        for name, value in settings.items()
    }
