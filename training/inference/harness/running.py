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
    from training.inference.harness.arguments import HarnessArguments
    from training.inference.model import ChatModel

PACKAGE = "lm_eval"
_DRAWS_BY_BOOTSTRAP = 1000  # of standard errors that have no formula
# Where the words of an error name the hub, whatever its class: its client, datasets and requests have a dozen.
_OF_A_HUB = ("huggingface.co", "offline mode", "couldn't reach", "couldn't find", "on the hub", "connection")


class TaskFigures(NamedTuple):
    """A task's figures. metrics: by name with its filter, as `acc` or `exact_match,strict`: (value, standard error or
    None). version: of its file."""

    rows: int
    fewshot: int
    version: str
    metrics: dict[str, tuple[float, float | None]]


class HarnessResult(NamedTuple):
    """The result of lm_eval. tasks: by name, also those of groups. samples: every row with its answers, by task."""

    version: str
    tasks: dict[str, TaskFigures]
    samples: dict[str, list[dict[str, Any]]]


def check_installed() -> None:
    """ThreestepError where lm_eval is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ThreestepError("harness needs the package lm_eval, which is not installed; run: pip install lm_eval")


def run_harness_on(chat: ChatModel, flags: HarnessArguments, rows_per_batch: int, *, templated: bool) -> HarnessResult:
    """Evaluate a model on the tasks. templated: questions pass through its chat template. ThreestepError for unknown
    tasks, and for data that would have to be fetched and cannot be."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    manager = _task_manager(flags.tasks_path)
    names = [_known_task(name, manager) for name in flags.tasks]
    template_kwargs = chat.data.chat.template_kwargs if templated else {}
    model = HFLM(
        pretrained=chat.model,
        tokenizer=chat.tokenizer,
        batch_size=rows_per_batch,
        max_length=chat.positions,
        chat_template_args=template_kwargs,
    )
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=flags.num_fewshot,
            limit=flags.task_rows,
            bootstrap_iters=_DRAWS_BY_BOOTSTRAP,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
            task_manager=manager,
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as problem:
        raise ThreestepError(_sentence_of(problem, flags.tasks)) from problem
    assert found is not None, "one process"
    return _result(lm_eval.__version__, found)


def _task_manager(folder: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is not None and not Path(folder).is_dir():
        raise ThreestepError(f"--tasks_path expects a folder of task files, got '{folder}', which is none")
    return TaskManager(include_path=folder)


def _known_task(name: str, manager: Any) -> str:
    """The task's name, or the path of its file."""
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise ThreestepError(f"--tasks expects a task's name or its file, got '{name}', which does not exist")
        return name
    if name not in manager.all_tasks:
        raise ThreestepError(
            f"--tasks expects tasks of lm-evaluation-harness, files or tasks of --tasks_path, got '{name}'; "
            "`lm_eval ls tasks` lists those of the package"
        )
    return name


def _sentence_of(problem: Exception, names: Sequence[str]) -> str:
    told = " ".join(str(problem).split())[:200]
    if isinstance(problem, ConnectionError) or any(word in told.lower() for word in _OF_A_HUB):
        return (
            f"--tasks {' '.join(names)}: lm_eval would fetch data or a metric from a hub, and cannot ({told}); go "
            "online, or give a task file whose dataset_path is json, with dataset_kwargs: {data_files: FILE}"
        )
    return f"--tasks {' '.join(names)}: lm_eval failed with {type(problem).__name__}: {told}"


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
