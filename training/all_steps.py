"""Runs the three steps one after the other from one YAML file, each fed with what the one before left.

    python -m training.all_steps --config examples/gsm8k.yaml

The file has a section for each step, `shared` for settings that all three take, and at the top what
concerns the whole run (`TOP_LEVEL`). Each step is a program of its own; this one knows their names, where
they leave their models, which dataclasses hold their flags, and which figures their summary.json holds. It
knows nothing of how they train.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from training.utils.run.arguments import parse_arguments, read_yaml
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names
from training.utils.run.launch import launch
from training.utils.run.program import run_program
from training.utils.run.report.writing import report_at_end

STEPS = ("step1_sft", "step2_reward", "step3_ppo")
TITLES = {
    "new_model": "a new model with random weights",
    "step1_sft": "step 1 of 3, supervised fine-tuning",
    "step2_reward": "step 2 of 3, the reward model",
    "step3_ppo": "step 3 of 3, PPO",
}
TOP_LEVEL = {
    "output_dir": "the run's folder",
    "ranks": "processes a step (THREESTEP_RANKS overrides; default: one a GPU, or one)",
    "seed": "one seed for everything",
    "dataset_module": "Python file or files that register datasets",
    "report": "false: no report.html at the end of the run and of each step",
    "model_name_or_path": "the model that step 1 starts from, where `new_model` makes none",
    "new_model": "flags of python -m training.new_model",
    "shared": "settings of all three steps",
    **{step: f"settings of python -m training.{step}.main" for step in STEPS},
}
# What this program sets in a step's settings, and where the user sets it instead.
_WIRED = {"output_dir": "output_dir at the top of the file", "seed": "seed at the top of the file, or --seed"}

# summary.json's keys: which step tells the figure, and under which name.
SUMMARY_KEYS = {
    "sft_eval_loss_before": ("step1_sft", "eval_loss_before"),
    "sft_eval_loss_after": ("step1_sft", "eval_loss_after"),
    "reward_pair_accuracy": ("step2_reward", "eval_accuracy"),
    "reward_sft": ("step3_ppo", "reward_before"),
    "reward_ppo": ("step3_ppo", "reward_after"),
    "reward_standard_error": ("step3_ppo", "reward_standard_error"),
    "checker_sft": ("step3_ppo", "checker_before"),
    "checker_ppo": ("step3_ppo", "checker_after"),
}
SECONDS_KEYS = {"step1_sft": "seconds_sft", "step2_reward": "seconds_reward", "step3_ppo": "seconds_ppo"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole run, read from its YAML file: nothing is started yet."""

    output_dir: Path
    ranks: int | None
    new_model: dict[str, Any] | None
    settings: dict[str, dict[str, Any]]  # by step; complete, as written to OUTPUT_DIR/configs
    report: bool = True


def main(argv: Sequence[str]) -> None:
    """Read the plan, run it, tell what came of it."""
    options = _parse(argv)
    config = _find_config(options.config, options.work_dir)
    if options.work_dir is not None:
        os.chdir(options.work_dir)
    plan = read_plan(read_yaml(config), str(config), options.output_dir, options.seed)
    config_files = write_settings(plan)
    check_settings(config_files)
    seconds = run_plan(plan, config_files)
    summary = summarize(plan.output_dir, seconds)
    path = plan.output_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"\n{format_table(summary)}\n\nwritten to {path}", flush=True)
    report_at_end(plan.output_dir, plan.report)


def read_plan(values: Mapping[str, Any], origin: str, output_dir: str | None = None, seed: int | None = None) -> Plan:
    """Return the plan in `values`, the YAML file `origin`'s content; `output_dir` and `seed` override it.

    Raises ThreestepError with every mistake found: unknown names, a value of the wrong kind, no model.
    """
    mistakes = Mistakes()
    for name in values:
        mistakes.require(name in TOP_LEVEL, f"{origin}: unknown section '{name}'{nearest_names(str(name), TOP_LEVEL)}")
    sections = {name: _section(values, name, origin, mistakes) for name in ("shared", *STEPS)}
    new_model = _section(values, "new_model", origin, mistakes) if "new_model" in values else None
    out = output_dir if output_dir is not None else values.get("output_dir")
    out_known = isinstance(out, str) and out != ""
    mistakes.require(out_known, f"{origin}: expected output_dir, a folder, got {out!r}")
    ranks = values.get("ranks")
    ranks_known = ranks is None or (isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 0)
    mistakes.require(ranks_known, f"{origin}: expected ranks to be a positive whole number, got {ranks!r}")
    report = values.get("report", True)
    mistakes.require(isinstance(report, bool), f"{origin}: expected report to be true or false, got {report!r}")
    first_model = values.get("model_name_or_path")
    mistakes.require(
        (new_model is None) != (first_model is None),
        f"{origin}: expected either model_name_or_path (a model to start from) or new_model (flags that make"
        f" one), got {'neither' if first_model is None else 'both'}",
    )
    mistakes.raise_if_any()

    folder = Path(out)  # type: ignore[arg-type]
    common = dict(sections["shared"])
    for name in ("dataset_module", "seed", "report"):
        if values.get(name) is not None:
            common[name] = values[name]
    if seed is not None:
        common["seed"] = seed
    first_model = str(folder / "new_model") if first_model is None else first_model
    return Plan(
        output_dir=folder,
        ranks=ranks,
        new_model=None if new_model is None else _new_model_flags(new_model, common, folder),
        settings={
            step: {
                **common,
                **_inputs(step, folder, first_model),
                **sections[step],
                "output_dir": str(folder / step),
            }
            for step in STEPS
        },
        report=report,
    )


def write_settings(plan: Plan) -> dict[str, Path]:
    """Write each step's settings to OUTPUT_DIR/configs/STEP.yaml; return the files."""
    folder = plan.output_dir / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    files = {step: folder / f"{step}.yaml" for step in STEPS}
    for step, path in files.items():
        text = yaml.safe_dump(plan.settings[step], sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
    return files


def check_settings(config_files: Mapping[str, Path]) -> None:
    """Raise a ThreestepError with the mistakes in all steps' settings, before anything is started.

    Each step's own parser reads its file, so that a slip in step 3's settings is not found after two steps.
    """
    mistakes = Mistakes()
    for step, path in config_files.items():
        try:
            parse_arguments(_argument_groups(step), ["--config", str(path)], "")
        except ThreestepError as problem:
            mistakes.add(f"{step}: {problem}")
    mistakes.raise_if_any()


def run_plan(plan: Plan, config_files: Mapping[str, Path]) -> dict[str, float]:
    """Run the programs in order; return each step's seconds. The first that fails ends this program."""
    for earlier in (plan.output_dir, *(plan.output_dir / step for step in STEPS)):
        with contextlib.suppress(FileNotFoundError):  # an earlier run's figures are not this run's
            (earlier / "summary.json").unlink()
    if plan.new_model is not None:
        _run("new_model", "training.new_model", _as_flags(plan.new_model), 1)
    seconds = {}
    for step in STEPS:
        seconds[step] = _run(step, f"training.{step}.main", ["--config", str(config_files[step])], plan.ranks)
        _end_where_stopped(step, plan.output_dir / step)
    return seconds


def summarize(output_dir: Path, seconds: Mapping[str, float]) -> dict[str, float | None]:
    """Return summary.json's content from the steps' own summaries; None where a step has no such figure."""
    summaries = {}
    for step in STEPS:
        path = output_dir / step / "summary.json"
        try:
            summaries[step] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as problem:
            raise ThreestepError(f"{step} ended well, but left no figures in {path}: {problem}") from problem
    summary: dict[str, float | None] = {key: summaries[step].get(name) for key, (step, name) in SUMMARY_KEYS.items()}
    summary.update({SECONDS_KEYS[step]: round(seconds[step], 1) for step in STEPS})
    return summary


def format_table(summary: Mapping[str, float | None]) -> str:
    """Return the closing table, in Markdown."""

    def number(key: str) -> str:
        value = summary[key]
        return "-" if value is None else f"{value:.4f}"

    error = summary["reward_standard_error"]
    margin = "" if error is None else f" (the difference's standard error: {error:.4f})"
    rows = [
        ("what, on held-out data", "before", "after"),
        ("---", "---:", "---:"),
        ("step 1: SFT loss", number("sft_eval_loss_before"), number("sft_eval_loss_after")),
        ("step 2: reward model's pair accuracy", "", number("reward_pair_accuracy")),
        (f"step 3: mean reward{margin}", number("reward_sft"), number("reward_ppo")),
    ]
    if summary["checker_sft"] is not None or summary["checker_ppo"] is not None:
        rows.append(("step 3: the exact checker", number("checker_sft"), number("checker_ppo")))
    for step, key in SECONDS_KEYS.items():
        rows.append((f"seconds: {TITLES[step].split(', ', 1)[1]}", "", f"{summary[key]:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row in rows:
        fill = "-" if row[0] == "---" else " "
        cells = [row[0].ljust(widths[0], fill), row[1].rjust(widths[1], fill), row[2].rjust(widths[2], fill)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _argument_groups(step: str) -> tuple[type, ...]:
    """The dataclasses that hold a step's flags: GROUPS in its main module, which is cheap to import."""
    return importlib.import_module(f"training.{step}.main").GROUPS


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    sections = "\n".join(f"  {name:<20} {text}" for name, text in TOP_LEVEL.items())
    parser = argparse.ArgumentParser(
        prog="python -m training.all_steps",
        description="Runs the three steps one after the other from one YAML file.",
        epilog=f"what the YAML file may hold:\n{sections}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a section for each step, in YAML")
    parser.add_argument("--output_dir", metavar="DIR", help="overrides output_dir of the file")
    parser.add_argument("--seed", type=int, help="overrides seed of the file")
    parser.add_argument("--work_dir", metavar="DIR", help="where relative paths start (default: here)")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        names = ("config", "output_dir", "seed", "work_dir")
        near = nearest_names(unknown[0].lstrip("-").split("=")[0], names)
        raise ThreestepError(f"python -m training.all_steps has no flag {unknown[0]}{near}")
    return options


def _find_config(name: str, work_dir: str | None) -> Path:
    """The file as named from here, else as named from `work_dir`."""
    here = Path(name).absolute()
    there = here if work_dir is None else Path(work_dir, name).absolute()
    return here if here.exists() else there


def _section(values: Mapping[str, Any], name: str, origin: str, mistakes: Mistakes) -> dict[str, Any]:
    section = values.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        mistakes.add(f"{origin}: expected '{name}' to hold settings, got {section!r}")
        return {}
    for setting, where in _WIRED.items():
        mistakes.require(setting not in section, f"{origin}: '{name}' sets {setting}; set {where}")
    return section


def _inputs(step: str, folder: Path, first_model: str) -> dict[str, str]:
    sft_model = str(folder / "step1_sft" / "model")
    if step == "step1_sft":
        return {"model_name_or_path": first_model}
    if step == "step2_reward":
        return {"model_name_or_path": sft_model}
    return {
        "actor_model_name_or_path": sft_model,
        "critic_model_name_or_path": str(folder / "step2_reward" / "model"),
    }


def _new_model_flags(section: Mapping[str, Any], common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    names = ("data_path", "dataset_module", "dataset_dir", "seed")
    inherited = {name: common[name] for name in names if name in common}
    return {**inherited, **section, "out": str(folder / "new_model")}


def _as_flags(settings: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags += [f"--{name}", "true" if value else "false"]
        elif isinstance(value, list):
            flags += [f"--{name}", *(str(item) for item in value)]
        else:
            flags.append(f"--{name}={value}")
    return flags


def _run(name: str, module: str, flags: Sequence[str], ranks: int | None) -> float:
    """Run one program; return its seconds, or end this program with its exit code."""
    print(f"\n== {TITLES[name]}", flush=True)
    started = time.monotonic()
    code = launch(module, flags, ranks)
    seconds = time.monotonic() - started
    if code != 0:
        print(
            f"error: {TITLES[name]} ({module}) ended with code {code} after {seconds:.0f} seconds; what it"
            " said stands above, and nothing after it was started",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(code)
    return seconds


def _end_where_stopped(step: str, folder: Path) -> None:
    """A step that a signal stopped ends well too, with a checkpoint in place of its figures."""
    if (folder / "checkpoints" / "latest").exists() and not (folder / "summary.json").exists():
        print(f"{TITLES[step]} was stopped and wrote a checkpoint; nothing after it was started", flush=True)
        sys.exit(0)


if __name__ == "__main__":
    run_program(main)
