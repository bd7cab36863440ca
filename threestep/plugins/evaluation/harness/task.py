"""`evaluate harness`: a finished model on tasks of lm-evaluation-harness, with the figures in its run's report."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.arguments import EvaluateArguments
from threestep.plugins.evaluation.harness.online import HARNESS
from threestep.plugins.evaluation.harness.running import (
    AskedModel,
    AskedTasks,
    HarnessResult,
    TaskFigures,
    check_installed,
    run_harness_on,
)
from threestep.plugins.evaluation.model import load_chat_folder, open_chat_folder, start_alone
from threestep.plugins.report.writing import REPORT_NAME, write_report
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.storage import parse_json, replace_file
from training.utils.data.chat.style import saved_style
from training.utils.data.rows.arguments import CHAT_TEMPLATE, HUMAN_ASSISTANT
from training.utils.generation.arguments import SamplingArguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.run.run_folder import METRICS, RunFolder, check_place

if TYPE_CHECKING:
    from threestep.plugins.evaluation.harness.arguments import HarnessArguments
    from threestep.plugins.evaluation.opening import Evaluated

TASK = "harness"


def run_harness(flags: Evaluated, harness: HarnessArguments) -> list[str]:
    """Evaluate the model, write figures and rows, put the figures into its run's report; return the lines to print."""
    _check(flags, harness)
    path = flags.evaluation.model_name_or_path
    check_installed()
    for ending in ("json", "jsonl"):
        check_place("--output_dir", str(Path(flags.run.output_dir) / f"{TASK}.{ending}"))
    check_model_folder(path)
    start = start_alone()
    chat = load_chat_folder(open_chat_folder(path, flags.data), flags.sampling.dtype, start.device)
    style = chat.data.chat.prompt_style
    if style == HUMAN_ASSISTANT and (saved := saved_style(chat.tokenizer)):
        asked_as = json.dumps("Human: {{question}}".join(saved.frame))
        note(
            f"{path} was trained on 'Human: ... Assistant:' prompts, but lm_eval uses the task file's prompt; for "
            f"this model, set doc_to_text: {asked_as}"
        )
    templated = style == CHAT_TEMPLATE
    template = chat.data.chat.template_kwargs if templated else None
    asked = AskedModel(chat.tokenizer, template, chat.positions, flags.evaluation.per_device_eval_batch_size)
    tasks = AskedTasks("--tasks", harness.tasks, harness.tasks_path, harness.num_fewshot, harness.task_rows)
    result = run_harness_on(chat.model, asked, tasks)
    return _write(flags, harness, result, templated)


def _check(flags: Evaluated, harness: HarnessArguments) -> None:
    """ThreestepError for flags that it does not take."""
    mistakes = Mistakes()
    mistakes.require(
        bool(harness.tasks), "harness expects --tasks (lm-evaluation-harness task names or task files), got none"
    )
    mistakes.require(
        not flags.data.source.data_path,
        "--data_path is not used here, because each task specifies its own data; remove it",
    )
    mistakes.require(
        flags.sampling.rollout_engine == SamplingArguments.rollout_engine,
        "--rollout_engine is not used here, because lm_eval generates with transformers; remove it",
    )
    for group in (flags.data.split, flags.reward):
        for each in fields(group):
            given = getattr(group, each.name)
            mistakes.require(given == each.default, f"--{each.name} {given} is not used here; remove it")
    for name in ("baseline", "reward_model", "val_samples", "benchmark", "split"):
        given, default = getattr(flags.evaluation, name), EvaluateArguments.__dataclass_fields__[name].default
        mistakes.require(given == default, f"--{name} {given} is not used here; remove it")
    mistakes.raise_if_any()


def _write(flags: Evaluated, harness: HarnessArguments, result: HarnessResult, templated: bool) -> list[str]:
    path, folder = flags.evaluation.model_name_or_path, RunFolder(flags.run.output_dir, is_main_rank=True)
    tasks = {name: figures.told(templated, result.version) for name, figures in result.tasks.items()}
    folder.write_json(f"{TASK}.json", {"task": TASK, "models": [path], "task_rows": harness.task_rows, "tasks": tasks})
    lines = [
        json.dumps({"task": name, **sample}, ensure_ascii=False, default=str) + "\n"
        for name, samples in result.samples.items()
        for sample in samples
    ]
    (folder.path / f"{TASK}.jsonl").write_text("".join(lines), encoding="utf-8")
    written = [f"written to {folder.path}: {TASK}.json, {TASK}.jsonl", *_in_report(Path(path), tasks)]
    return [*(line for name, figures in result.tasks.items() for line in _lines(name, figures)), *written]


def _lines(name: str, figures: TaskFigures) -> list[str]:
    return [
        f"{name} {metric:<20} {value:.4f}{'' if error is None else f' ± {error:.4f} (s.e.)'}, {figures.rows:,} rows"
        for metric, (value, error) in figures.metrics.items()
    ]


def _in_report(model: Path, tasks: dict[str, Any]) -> list[str]:
    """Put the figures beside those of earlier tasks into the folder of the run that left the model, and write its
    report again; the lines to print. Nothing for a model that no run left."""
    run = model.parent
    if not (run / METRICS).is_file():
        return []
    place = run / HARNESS
    try:
        known = parse_json(place.read_text(encoding="utf-8")) if place.is_file() else {}
        together = {**(known if isinstance(known, dict) else {}), **tasks}
        replace_file(place, (json.dumps(together, indent=2) + "\n").encode())
        return [f"added to the run's report: {write_report([run], run / REPORT_NAME)}"]
    except (OSError, ValueError, ThreestepError) as problem:
        return [f"warning: could not add the results to the run's report ({problem})"]
