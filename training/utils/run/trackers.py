"""Who is told of a run's figures beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow.

Each is a class with the same four methods, made from a folder and the settings; its package is imported when it
is made. Only the MetricsWriter calls them, on the main rank.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from training.utils.run.errors import ThreestepError
from training.utils.run.report.figures import CURVES
from training.utils.run.report.reading import kind_of

PROJECT = "threestep"
_IDS = "tracker_runs.json"  # in the run's folder: how a resumed run finds itself again
_SHOWN_SAMPLES = 8
_COLUMNS = ("prompt", "response", "reward", "response_tokens", "check")


class Tracker(Protocol):
    """One place that is told of a run."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Record plain numbers at a step."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record some of a step's samples, as text."""

    def flush(self) -> None:
        """Put on disk what was told so far, where it is the tracker's to do so."""

    def close(self, ended_well: bool) -> None:
        """The run is over."""


def open_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], done_steps: int) -> list[Tracker]:
    """Those of `--report_to`. done_steps: of a resumed run, which goes on under the same name in each of them.

    ThreestepError where one cannot be opened: better now than after days of training that it hears nothing of.
    """
    if not done_steps:
        (folder / _IDS).unlink(missing_ok=True)  # an earlier run's in the same folder
    ids = _read_ids(folder)
    made: list[Tracker] = []
    for name in names:
        try:
            made.append(TRACKERS[name](folder, settings, done_steps, ids))
        except Exception as problem:  # (each package has exceptions of its own)
            raise ThreestepError(
                f"--report_to {name}: it cannot be told of the run ({type(problem).__name__}: "
                f"{' '.join(str(problem).split())}); set it up as its own documentation says, or leave it out"
            ) from problem
    if ids:
        (folder / _IDS).write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return made


class TensorBoard:
    """Files in OUTPUT_DIR/tensorboard: scalars, a layout of the charts that belong together, settings, samples."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not done_steps:
            for stale in (folder / "tensorboard").glob("events.out.tfevents.*"):
                stale.unlink()  # this run's curves replace those of an earlier run in the same folder
        # TensorBoard hides what the earlier part of the run told of steps from purge_step on.
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1 if done_steps else None)
        self._settings = settings
        self._seen: dict[str, None] = {}
        self._is_described = False

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)
        if not self._is_described:
            self._seen |= dict.fromkeys(figures)
            if not all(name.startswith("eval/") for name in figures):
                self._describe()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for place, sample in enumerate(samples[:_SHOWN_SAMPLES]):
            told = "\n\n".join(f"{name}: {sample[name]}" for name in _COLUMNS if name in sample)
            # Four spaces make it a block of plain text in Markdown, whatever a model wrote.
            self._board.add_text(f"samples/{place}", "".join(f"    {line}\n" for line in told.splitlines()), step)

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
        layout = chart_layout(list(self._seen))
        if layout:
            self._board.add_custom_scalars(layout)
        results = dict.fromkeys((name for name in self._seen if name.startswith("eval/")), 0.0)  # the names count
        # add_hparams would write them to a run of its own, beside the curves.
        writer: Any = self._board.file_writer
        for part in hparams(_flat(self._settings), results):
            writer.add_summary(part)


class WeightsAndBiases:
    """A run of Weights & Biases: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and its other variables hold."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=_project("WANDB_PROJECT"),
            name=run_name(folder),
            dir=str(folder),
            config=dict(settings),
            id=ids.get("wandb"),
            resume="allow" if "wandb" in ids else None,
        )
        ids["wandb"] = self._run.id
        # A step axis of its own: W&B's refuses to go back, and a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[sample.get(name) for name in _COLUMNS] for sample in samples[:_SHOWN_SAMPLES]]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=list(_COLUMNS), data=rows)})

    def flush(self) -> None:
        pass  # a process of its own writes

    def close(self, ended_well: bool) -> None:
        self._run.finish(exit_code=0 if ended_well else 1)


class Trackio:
    """A run of Trackio: on this machine, or where TRACKIO_SPACE_ID says."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import trackio

        self._trackio = trackio
        name = ids.get("trackio")
        self._run = trackio.init(
            project=_project("TRACKIO_PROJECT"),
            name=name,
            config={"folder": run_name(folder), **_flat(settings)},
            resume="allow" if name else "never",
            embed=False,
        )
        ids["trackio"] = self._run.name

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = [[sample.get(name) for name in _COLUMNS] for sample in samples[:_SHOWN_SAMPLES]]
        self._trackio.log({"samples": self._trackio.Table(columns=list(_COLUMNS), data=rows)}, step=step)

    def flush(self) -> None:
        pass  # a thread of its own writes

    def close(self, ended_well: bool) -> None:
        self._trackio.finish()


class MLflow:
    """A run of MLflow: where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], done_steps: int, ids: dict[str, str]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(_project("MLFLOW_EXPERIMENT_NAME"))
        known = ids.get("mlflow")
        run = mlflow.start_run(run_id=known, run_name=None if known else run_name(folder), log_system_metrics=False)
        ids["mlflow"] = run.info.run_id
        if known is None:
            self._log_settings(settings)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        # Its databases hold no infinity.
        self._mlflow.log_metrics({name: value for name, value in figures.items() if math.isfinite(value)}, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        told = [{name: sample.get(name) for name in _COLUMNS} for sample in samples[:_SHOWN_SAMPLES]]
        self._mlflow.log_text(json.dumps(told, indent=1, ensure_ascii=False), f"samples/step_{step:06d}.json")

    def flush(self) -> None:
        pass  # each call writes

    def close(self, ended_well: bool) -> None:
        self._mlflow.end_run("FINISHED" if ended_well else "FAILED")

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        told = list(_flat(settings).items())
        for start in range(0, len(told), 100):  # the most that one request may hold
            self._mlflow.log_params({name: str(value)[:6000] for name, value in told[start : start + 100]})


_Opener = Callable[[Path, Mapping[str, Any], int, dict[str, str]], Tracker]
TRACKERS: dict[str, _Opener] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def chart_layout(names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the report's charts of this kind of step that have these metrics."""
    kind = kind_of([dict.fromkeys(names)], {})
    charts = {}
    for title, _, metrics in CURVES[kind]:
        present = [f"^{re.escape(name)}$" for name in metrics.values() if name in names]
        if present:
            charts[title] = ["Multiline", present]
    return {"Threestep": charts} if charts else {}


def run_name(folder: Path) -> str:
    """The run's folder in its parent, as quickstart/step1_sft."""
    return "/".join(folder.resolve().parts[-2:]).lstrip("/")


def _project(variable: str) -> str:
    return os.environ.get(variable) or PROJECT


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as trackers take them: numbers, booleans and texts."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
        for name, value in settings.items()
    }


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / _IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
