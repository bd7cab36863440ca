"""One call of the package lm_eval, whose failures are sentences. Only this module loads it."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "lm_eval"
_DRAWS_BY_BOOTSTRAP = 1000  # of standard errors that have no formula
# Where the words of an error name the hub, whatever its class: its client, datasets and requests have a dozen.
_OF_A_HUB = ("huggingface.co", "offline mode", "couldn't reach", "couldn't find", "on the hub", "connection")


class AskedTasks(NamedTuple):
    """Tasks of lm_eval. flag: that names them. folder: of further task files. fewshot: solved examples; None: each
    task's own. rows: the first of each task; None: all."""

    flag: str
    names: Sequence[str]
    folder: str | None = None
    fewshot: int | None = None
    rows: int | None = None


class AskedModel(NamedTuple):
    """Settings of asking a model. template: variables of its chat template, through which questions pass; None: they
    are asked as tasks say. positions: tokens that it reads at most."""

    tokenizer: Any
    template: dict[str, Any] | None
    positions: int | None
    rows_per_batch: int


class TaskFigures(NamedTuple):
    """A task's figures. metrics: by name with its filter, as `acc` or `exact_match,strict`: (value, standard error or
    None). version: of its file."""

    rows: int
    fewshot: int
    version: str
    metrics: dict[str, tuple[float, float | None]]

    def told(self, templated: bool, package: str) -> dict[str, Any]:
        """As harness.json has them. package: its version."""
        metrics = {name: {"value": value, "error": error} for name, (value, error) in self.metrics.items()}
        return {**self._asdict(), "metrics": metrics, "chat_template": templated, "lm_eval": package}


class HarnessResult(NamedTuple):
    """The result of lm_eval. tasks: by name, also those of groups. samples: every row with its answers, by task."""

    version: str
    tasks: dict[str, TaskFigures]
    samples: dict[str, list[dict[str, Any]]]


def check_installed(what: str = "harness") -> None:
    """ThreestepError where lm_eval is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ThreestepError(
            f"{what} needs the package lm_eval, which is not installed; in the "
            "checkout, run pip install -e '.[harness]'"
        )


def run_harness_on(model: PreTrainedModel, asked: AskedModel, tasks: AskedTasks) -> HarnessResult:
    """Evaluate a model on the tasks. ThreestepError for unknown tasks, and for data that would have to be fetched and
    cannot be. Moves the random state of this process."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    manager = _task_manager(tasks.folder)
    names = [_known_task(tasks.flag, name, manager) for name in tasks.names]
    templated = asked.template is not None
    wrapped = HFLM(
        pretrained=model,
        tokenizer=asked.tokenizer,
        batch_size=asked.rows_per_batch,
        max_length=asked.positions,
        chat_template_args=asked.template or {},
    )
    try:
        found = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=names,
            num_fewshot=tasks.fewshot,
            limit=tasks.rows,
            bootstrap_iters=_DRAWS_BY_BOOTSTRAP,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
            task_manager=manager,
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as problem:
        raise ThreestepError(_sentence_of(problem, tasks)) from problem
    assert found is not None, "one process"
    return _result(lm_eval.__version__, found)


def _task_manager(folder: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ThreestepError(f"--tasks_path expects a folder with task files, got '{folder}', which is not a folder")
    return TaskManager(include_path=folder)


def _known_task(flag: str, name: str, manager: Any) -> str:
    """The task's name, or the path of its file."""
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise ThreestepError(f"{flag} expects a task name or a task file, got '{name}', which does not exist")
        return name
    if name not in manager.all_tasks:
        raise ThreestepError(
            f"{flag} expects lm-evaluation-harness tasks, task files or tasks in --tasks_path, got '{name}'; "
            "run `lm_eval ls tasks` to list the package's tasks"
        )
    return name


def _sentence_of(problem: Exception, tasks: AskedTasks) -> str:
    told, given = " ".join(str(problem).split())[:200], f"{tasks.flag} {' '.join(tasks.names)}"
    if isinstance(problem, ConnectionError) or any(word in told.lower() for word in _OF_A_HUB):
        return (
            f"{given}: lm_eval could not fetch data or a metric from the hub ({told}); go online, or use a task file "
            f"with dataset_path: json and dataset_kwargs: {{data_files: FILE}}"
        )
    return f"{given}: lm_eval failed with {type(problem).__name__}: {told}"


def _result(version: str, found: dict[str, Any]) -> HarnessResult:
    tasks = {}
    for name, figures in found["results"].items():
        metrics = {}
        for key, value in figures.items():
            metric, _, rest = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, (int, float)) or not rest:
                continue
            error = figures.get(f"{metric}_stderr,{rest}")
            shown = metric if rest == "none" else key
            metrics[shown] = (float(value), float(error) if isinstance(error, (int, float)) else None)
        rows = found.get("n-samples", {}).get(name, {}).get("effective", 0)
        fewshot, version_of = found.get("n-shot", {}).get(name, 0), found.get("versions", {}).get(name, "")
        tasks[name] = TaskFigures(int(rows), int(fewshot or 0), str(version_of), metrics)
    return HarnessResult(version, tasks, found.get("samples") or {})
