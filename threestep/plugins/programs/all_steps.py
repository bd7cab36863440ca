"""Runs several steps in order from one YAML file, each on the models of earlier steps.

    threestep all --config examples/gsm8k.yaml

The file has a section for each step, `shared` for settings of every step, and top-level keys for the whole run
(`TOP_LEVEL`). The steps are SFT, reward model and PPO; with a section `step2_dpo`, SFT and DPO; with `rounds` and
`best_of`, repeated DPO on responses drawn by the previous round's model. Each step is a separate program: this one
knows only what their STEP declares, not how they train.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from training.utils.base.console import (
    COMMAND_VARIABLE,
    HOSTFILE_VARIABLE,
    OWN_WORDS_VARIABLE,
    WHOLE_RUN_VARIABLE,
    typed_command,
)
from training.utils.base.credentials import lend, redacted, redacted_value
from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.reading import checked_json, checked_value, read_text
from training.utils.base.storage import remove
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run
from training.utils.data.arguments import DataArguments
from training.utils.data.file_dataset import look_at_data
from training.utils.flags.arguments import ProgramParser, parse_arguments, read_yaml, words_of
from training.utils.flags.step import known_steps
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.plugins.registry import added, foreign_runs, hooks, owner_sentence, plugin_module
from training.utils.run.launch import choose_ranks, launch, visible_gpus
from training.utils.run.program import run_program
from training.utils.run.run_folder import RunFolder, check_place

DRAWING = "best_of"  # the section of what rounds draw, as its program is called
ROUND_STEP = "step2_dpo"  # that rounds train
LAST_STEP = "step3_ppo"  # unless the file has a section of a step that does not lead to it
_OWN_TOP_LEVEL = {
    "output_dir": "the run's folder",
    "ranks": "ranks per step (THREESTEP_RANKS overrides this; default: one per GPU, or one without GPUs)",
    "seed": "seed for all steps",
    "dataset_module": "Python file or files that register datasets",
    "resume": "true: like --resume",
    "model_name_or_path": "model that step 1 starts from, if there is no `new_model`",
    "new_model": "flags of threestep new-model",
    "shared": "settings for every step",
    "rounds": "rounds of best of n and DPO, needs a section best_of (threestep/plugins/evaluation/best_of.md)",
    DRAWING: "settings of threestep evaluate best_of for each round",
}
SWITCHES: dict[str, str] = added("whole_run_switches", _OWN_TOP_LEVEL)
TOP_LEVEL = {**_OWN_TOP_LEVEL, **SWITCHES}
_RESUME = "--resume"
_SECONDS = "seconds.json"  # in the run's folder: by step, of all parts of a run that was resumed
# What this program sets in a step's settings, and where the user sets it instead.
_WIRED = {"output_dir": "output_dir at the top of the file", "seed": "seed at the top of the file, or --seed"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole run, read from its YAML file."""

    output_dir: Path
    ranks: int | None
    new_model: dict[str, Any] | None
    settings: dict[str, dict[str, Any]]  # by step, in their order; complete, as written to OUTPUT_DIR/configs
    switches: dict[str, bool] = dataclasses.field(default_factory=dict)
    resume: bool = False
    rounds: Any = None  # after the steps: TrainingRounds of the plugin evaluation


def main(argv: Sequence[str]) -> None:
    """Read the plan, run it, print its figures."""
    options = _parse(argv)
    plan = read_plan(*_values_of(options), options.output_dir, options.seed)
    if options.num_ranks is not None:
        plan = dataclasses.replace(plan, ranks=options.num_ranks)
    if options.step:
        _refuse_rounds(plan)
        plan = _chosen_steps(plan, options.step)
    resumes = plan.resume if options.resume is None else options.resume
    finished = finished_steps(plan) if resumes else ()
    if not resumes and not options.overwrite:
        refuse_finished_steps(plan)
    if resumes:
        resumed = {name: {**settings, "resume": "latest"} for name, settings in plan.settings.items()}
        plan = dataclasses.replace(plan, settings=resumed)
    lend([plan.settings, plan.new_model], os.environ)  # the files that the steps read are without credentials
    if options.dry_run:
        return show(plan, finished)
    config_files = write_settings(plan)
    check_settings(config_files)
    stages = prepared_rounds(plan, resumes, bool(options.overwrite))
    resume_command = resuming_whole_run("threestep.plugins.programs.all_steps", argv)
    seconds = run_plan(plan, config_files, finished, resume_command, overwrite=bool(options.overwrite))
    run_rounds(plan, stages, resume_command)
    summary = summarize(plan.output_dir, seconds)
    folder = RunFolder(plan.output_dir, is_main_rank=True)
    folder.write_figures("summary.json", summary)
    tables = [format_table(summary, seconds), *_table_of_rounds(plan, stages)]
    print("\n" + "\n\n".join(tables) + f"\n\nwritten to {folder.path / 'summary.json'}", flush=True)
    folder.settle()
    if plan.settings:  # each round ends by itself
        for at_end in hooks("at_end_of_all"):
            at_end(plan.output_dir, plan.switches)


def _values_of(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the plan's values and where they stand: in --config, or in another program's flags. Goes to --work_dir."""
    foreign = [(run, given) for run in foreign_runs() if (given := run.given_flags(options))]
    mistakes = Mistakes()
    mistakes.require(
        bool(foreign) != bool(options.config),
        (
            f"the command line has both --config and {foreign[0][0].NAME}'s flags, which replace a config file; use "
            "only one of the two"
        )
        if foreign
        else "--config expects a YAML file with a section for each step, got none; see --help",
    )
    mistakes.raise_if_any()
    config = None if foreign else _find_config(options.config, options.work_dir)
    if options.work_dir is not None:
        os.chdir(options.work_dir)
    if config is not None:
        return read_yaml(config), str(config)
    run, given = foreign[0]
    return run.settings_of(given, os.environ), f"{run.NAME}'s settings"


def read_plan(values: Mapping[str, Any], origin: str, output_dir: str | None = None, seed: int | None = None) -> Plan:
    """Return the plan in `values`, the YAML file `origin`'s content; `output_dir` and `seed` override it.

    Raises ThreestepError with every mistake found: unknown names, a value of the wrong kind, no model.
    """
    mistakes = Mistakes()
    known = (*TOP_LEVEL, *known_steps())
    for name in values:
        hint = owner_sentence("whole_run_switches", str(name)) or nearest_names(str(name), known)
        mistakes.require(name in known, f"{origin}: unknown section '{name}'{hint}")
    has_rounds = DRAWING in values or values.get("rounds") is not None
    steps = (steps_before_rounds if has_rounds else steps_of)(values, origin, mistakes)
    sections = {name: _section(values, name, origin, mistakes) for name in ("shared", DRAWING, ROUND_STEP, *steps)}
    new_model = _section(values, "new_model", origin, mistakes) if "new_model" in values else None
    out = output_dir if output_dir is not None else values.get("output_dir")
    out_known = isinstance(out, str) and out != ""
    mistakes.require(out_known, f"{origin}: output_dir must be a folder, got {out!r}")
    ranks = values.get("ranks")
    ranks_known = ranks is None or (isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 0)
    mistakes.require(ranks_known, f"{origin}: ranks must be a positive whole number, got {ranks!r}")
    switches = {name: values.get(name, True) for name in SWITCHES}
    for name, is_on in switches.items():
        mistakes.require(isinstance(is_on, bool), f"{origin}: {name} must be true or false, got {is_on!r}")
    resume = values.get("resume") or False
    mistakes.require(
        isinstance(resume, bool),
        f"{origin}: resume must be true or false, got {resume!r}; to resume from a specific checkpoint, set resume in "
        "a step's section",
    )
    first_model = values.get("model_name_or_path")
    inside = next((name for name, section in sections.items() if "model_name_or_path" in section), None)
    move = f"; move model_name_or_path from '{inside}' to the top of the file" if inside else ""
    mistakes.require(
        (new_model is None) != (first_model is None),
        f"{origin}: set either model_name_or_path (a model to start from) or new_model (flags that create one), "
        f"got {f'neither{move}' if first_model is None else 'both'}",
    )
    mistakes.raise_if_any()

    folder = Path(out)  # type: ignore[arg-type]
    common = dict(sections["shared"])
    for name in ("dataset_module", "seed", *SWITCHES):
        if values.get(name) is not None:
            common[name] = values[name]
    if seed is not None:
        common["seed"] = seed
    first_model = str(folder / "new_model") if first_model is None else first_model
    models = {step: _models(step, folder, first_model, steps) for step in (*steps, ROUND_STEP)}
    return Plan(
        output_dir=folder,
        ranks=ranks,
        new_model=None if new_model is None else _new_model_flags(new_model, common, folder),
        settings={
            step: {**common, **models[step], **sections[step], "output_dir": str(folder / step)} for step in steps
        },
        switches=switches,
        resume=resume,
        rounds=_rounds(values["rounds"], folder, common, sections, models=models) if has_rounds else None,
    )


def steps_of(sections: Iterable[str], origin: str, mistakes: Mistakes) -> tuple[str, ...]:
    """The steps to run, in order: those whose models the last one takes, and itself."""
    known = known_steps()

    def leading_to(last: str) -> tuple[str, ...]:
        earlier = (step for name in known[last].inputs.values() if name for step in leading_to(name))
        return tuple(dict.fromkeys((*earlier, last)))

    named = [name for name in sections if name in known]
    others = [name for name in named if name not in leading_to(LAST_STEP)]
    steps = leading_to(others[0] if others else LAST_STEP)
    for name in named:
        mistakes.require(
            name in steps,
            f"{origin}: expected only sections for steps leading up to '{steps[-1]}' ({', '.join(steps)}), but also "
            f"found '{name}'; remove '{name}' or '{steps[-1]}'",
        )
    return steps


def steps_before_rounds(values: Mapping[str, Any], origin: str, mistakes: Mistakes) -> tuple[str, ...]:
    """The steps to run before rounds: SFT and a reward model, each where the file has its section; of a new model, SFT
    always."""
    known = known_steps()
    before = tuple(known[LAST_STEP].inputs.values())
    counted = values.get("rounds")
    is_count = isinstance(counted, int) and not isinstance(counted, bool) and counted > 0
    mistakes.require(is_count, f"{origin}: rounds must be a positive whole number, got {counted!r}")
    mistakes.require(DRAWING in values, f"{origin}: rounds require the section '{DRAWING}', but it is missing; add it")
    for name in values:
        mistakes.require(
            name not in known or name in (*before, ROUND_STEP),
            f"{origin}: rounds train {ROUND_STEP} after {' and '.join(map(str, before))}, but the file also has "
            f"'{name}'; remove it",
        )
    first = [name for name in before if name in known and None in known[name].inputs.values()]
    return tuple(
        name for name in known if name in before and (name in values or (name in first and "new_model" in values))
    )


def write_settings(plan: Plan, folder: Path | None = None) -> dict[str, Path]:
    """Write each step's settings to FOLDER/STEP.yaml; return the files. folder: OUTPUT_DIR/configs by default."""
    folder = plan.output_dir / "configs" if folder is None else folder
    files = {step: folder / f"{step}.yaml" for step in plan.settings}
    for step, path in files.items():
        check_place("output_dir", path)
        text = yaml.safe_dump(redacted_value(plan.settings[step]), sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")
    return files


def check_settings(config_files: Mapping[str, Path]) -> dict[str, tuple[Any, ...]]:
    """Return all steps' settings as their groups. ThreestepError with the mistakes in them, before anything is started.

    Each step's parser reads its file, so that a slip in step 3's settings is not found after two steps.
    """
    mistakes = Mistakes()
    parsed: dict[str, tuple[Any, ...]] = {}
    for step, path in config_files.items():
        try:
            words, known = ["--config", str(path)], known_steps()[step]
            parsed[step] = parse_arguments(known.groups, words, "", known.old_flags, unread=known.set_aside)
        except ThreestepError as problem:
            mistakes.add(f"{step}: {problem}")
    mistakes.raise_if_any()
    return parsed


def show(plan: Plan, finished: Sequence[str] = ()) -> None:
    """Print the commands of a run and their folders (--dry_run). ThreestepError for what can be seen to fail before the
    models of earlier steps are there. Nothing is written."""
    with tempfile.TemporaryDirectory() as place:
        try:
            parsed = check_settings(write_settings(plan, Path(place)))
            stages = prepared_rounds(plan, True, False, Path(place))
        except ThreestepError as mistake:
            raise ThreestepError(str(mistake).replace(f"{place}{os.sep}", "")) from mistake
    _check_inputs(plan, parsed)
    hosts = os.environ.get(HOSTFILE_VARIABLE)
    ranks = choose_ranks(plan.ranks, os.environ, len(visible_gpus(os.environ)))
    where = f"on the hosts of {hosts}" if hosts else f"on {ranks} rank{'s' if ranks > 1 else ''}"
    print(f"dry run: nothing is trained or written; this would run {where}")
    if plan.new_model is not None and not finished and not _goes_on(plan):
        print(
            f"\n== a new model with random weights\n{_command('threestep.plugins.programs.new_model', plan.new_model)}"
        )
    for place_of, (name, settings) in enumerate(plan.settings.items(), start=1):
        step = known_steps()[name]
        state = "finished before" if name in finished else _state_of(plan.output_dir / name)
        models = ", ".join(dict.fromkeys(settings[flag] for flag in step.inputs))
        print(f"\n== step {place_of} of {len(plan.settings)}, {step.title}\n{_command(step.program, settings)}")
        print(f"reads {models}; writes {settings['output_dir']} ({state})")
    for stage, _, _ in stages:
        print(f"\n== {stage.title}\n{_command(' '.join([stage.module, *stage.words]), stage.settings)}")
    print("\nchecked: the settings and data of every step, and the models that already exist")


def _check_inputs(plan: Plan, parsed: Mapping[str, tuple[Any, ...]]) -> None:
    """Collect what is wrong with the data of the steps, and with models that none of them makes."""
    mistakes: dict[str, list[str]] = {}  # each with the steps that have it
    made = {str(plan.output_dir / name / "model") for name in plan.settings}
    if plan.new_model is not None:
        made.add(str(plan.output_dir / "new_model"))
    for name, groups in parsed.items():
        step, found = known_steps()[name], Mistakes()
        for model in dict.fromkeys(plan.settings[name][flag] for flag in step.inputs):
            if model not in made:
                found.note(check_model_folder, model)
        for data in (group for group in groups if isinstance(group, DataArguments)):
            found.note(look_at_data, int(step.number), data.source)
        for sentence in found.different:
            mistakes.setdefault(sentence, []).append(name)
    all_found = Mistakes()
    for sentence, names in mistakes.items():
        all_found.add(f"{', '.join(names)}: {sentence}")
    all_found.raise_if_any()


def _command(module: str, settings: Mapping[str, Any]) -> str:
    """The command line that runs a program with these settings."""
    words = [word for name, value in settings.items() if value != [] for word in words_of(name, value)]
    return f"python -m {module} {redacted(shlex.join(words))}"


def _state_of(folder: Path) -> str:
    if not folder.exists():
        return "new"
    return "holds a run that would be replaced" if (folder / "summary.json").exists() else "is there"


def finished_steps(plan: Plan) -> tuple[str, ...]:
    """The first steps that an earlier run with the same settings finished, in their order."""
    finished: list[str] = []
    for step, settings in plan.settings.items():
        written = plan.output_dir / "configs" / f"{step}.yaml"
        mine = redacted_value({**settings, "resume": None})
        same = written.exists() and redacted_value({**read_yaml(written), "resume": None}) == mine
        if not (same and (plan.output_dir / step / "summary.json").exists()):
            break
        finished.append(step)
    return tuple(finished)


def refuse_finished_steps(plan: Plan) -> None:
    """ThreestepError if a step of the plan would overwrite one that is finished, or the checkpoints of one."""
    for step, settings in plan.settings.items():
        if not settings.get("overwrite") and not settings.get("resume"):
            try:
                check_earlier_run(CheckpointFolder(plan.output_dir / step), resumes=False)
            except ThreestepError as refusal:
                also = "" if "--resume" in str(refusal) else ", or --resume to skip finished steps"
                raise ThreestepError(f"{step}: {refusal}{also}") from refusal


def run_plan(
    plan: Plan,
    config_files: Mapping[str, Path],
    finished: Sequence[str] = (),
    resume_command: str = "",
    *,
    overwrite: bool = False,
) -> dict[str, float]:
    """Run the programs in order; return each step's seconds, those of earlier parts of a resumed run included. The
    first that fails ends this program. finished: steps to leave out. resume_command: resumes the run. overwrite: what
    an earlier run left."""
    seconds = _earlier_seconds(plan)
    for earlier in (plan.output_dir, *(plan.output_dir / step for step in plan.settings if step not in finished)):
        with contextlib.suppress(FileNotFoundError):  # an earlier run's figures are not this run's
            (earlier / "summary.json").unlink()
    if plan.new_model is not None and not finished and not _goes_on(plan):
        flags = [word for name, value in plan.new_model.items() for word in words_of(name, value)]
        _run("a new model with random weights", "threestep.plugins.programs.new_model", flags, 1)
    environment = _of_whole_run()
    for place, step in enumerate(map(known_steps().get, plan.settings), start=1):
        assert step is not None  # read_plan takes known steps alone
        title = f"step {place} of {len(plan.settings)}, {step.title}"
        if step.name in finished:
            print(f"\n== {title}: finished before", flush=True)
            continue
        flags = ["--config", str(config_files[step.name]), *(["--overwrite"] if overwrite else [])]
        started = time.monotonic()
        try:
            _run(title, step.program, flags, plan.ranks, environment=environment)
        finally:
            seconds[step.name] = seconds.get(step.name, 0.0) + time.monotonic() - started
            RunFolder(plan.output_dir, is_main_rank=True).write_figures(_SECONDS, seconds)
        _end_where_stopped(title, plan.output_dir / step.name, resume_command)
    return {name: seconds.get(name, 0.0) for name in plan.settings}


def resuming_whole_run(program: str, words: Sequence[str]) -> str:
    """The command that was typed, with `--resume`. program: the module that got the words, as `python -m` takes it."""
    skipped = int(os.environ.get(OWN_WORDS_VARIABLE, "0")) if typed_command() else 0
    typed: list[str] = []
    for word in words[skipped:]:
        if word.lower() in ("true", "false") and typed[-1:] == [_RESUME]:
            continue  # its value
        typed.append(_RESUME if word.startswith(f"{_RESUME}=") else word)
    again = [*typed, *([] if _RESUME in typed else [_RESUME])]
    return f"{typed_command() or f'python -m {program}'} {shlex.join(again)}"


def _goes_on(plan: Plan) -> bool:
    """True if the first step resumes from a checkpoint, and the new model that it started from is there."""
    name, settings = next(iter(plan.settings.items()))
    needed = (plan.output_dir / name / "checkpoints" / "latest", plan.output_dir / "new_model" / "config.json")
    return bool(settings.get("resume")) and all(path.exists() for path in needed)


def _of_whole_run() -> dict[str, str]:
    """The environment of the programs that this one starts."""
    own = (COMMAND_VARIABLE, OWN_WORDS_VARIABLE)  # of this program
    return {**{name: value for name, value in os.environ.items() if name not in own}, WHOLE_RUN_VARIABLE: "1"}


def _earlier_seconds(plan: Plan) -> dict[str, float]:
    """Seconds of each step in the parts before this one, if the run is resumed."""
    path = plan.output_dir / _SECONDS
    if not path.exists() or not any(settings.get("resume") for settings in plan.settings.values()):
        return {}
    found: dict[str, float] = checked_json(dict[str, float], read_text(path), path)
    return found


def summarize(output_dir: Path, seconds: Mapping[str, float]) -> dict[str, float | None]:
    """Return summary.json's content from the summaries of the steps in `seconds`; None for a figure that is missing."""
    summary: dict[str, float | None] = {}
    for step in seconds:
        path = output_dir / step / "summary.json"
        try:
            figures = checked_json(dict[str, Any], read_text(path), path)
        except ThreestepError as problem:
            raise ThreestepError(f"{step} finished, but its metrics could not be read: {problem}") from problem
        summary |= {key: figures.get(name) for row in known_steps()[step].figures.closing for key, name in row.keys()}
    return {**summary, **{f"seconds_{known_steps()[step].kind}": round(seconds[step], 1) for step in seconds}}


def format_table(summary: Mapping[str, float | None], steps: Iterable[str]) -> str:
    """Return the closing table of these steps, in Markdown."""

    def number(pair: tuple[str, str] | None) -> str:
        if pair is None:
            return ""
        value = summary[pair[0]]
        return "-" if value is None else f"{value:.4f}"

    rows = [("result on held-out data", "before", "after"), ("---", "---:", "---:")]
    declared = [known_steps()[name] for name in steps]
    for step in declared:
        for row in step.figures.closing:
            if row.optional and all(summary[key] is None for key, _ in row.keys()):
                continue
            has_error = row.error is not None and summary[row.error[0]] is not None
            margin = f" (standard error of the difference: {number(row.error)})" if has_error else ""
            rows.append((f"step {step.number}: {row.title}{margin}", number(row.before), number(row.after)))
    rows += [(f"seconds: {step.title}", "", f"{summary[f'seconds_{step.kind}']:.1f}") for step in declared]
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    lines = []
    for name, before, after in rows:
        fill = "-" if name == "---" else " "
        lines.append(f"| {name:{fill}<{first}} | {before:{fill}>{second}} | {after:{fill}>{third}} |")
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    steps = {step.name: f"settings of python -m {step.program}" for step in known_steps().values()}
    sections = "\n".join(f"  {name:<20} {text}" for name, text in {**TOP_LEVEL, **steps}.items())
    parser = ProgramParser(
        "threestep.plugins.programs.all_steps",
        "Run SFT, reward model and PPO, or SFT and DPO, in order from one YAML file.",
        epilog=f"what the YAML file may contain: {sections}",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with a section for each step")
    parser.add_argument("--output_dir", "--output-dir", metavar="DIR", help="overrides output_dir in the file")
    parser.add_argument(
        "--step", nargs="+", metavar="N", help="steps to run, by number; the models from all other steps must exist"
    )
    parser.add_argument("--seed", type=int, help="overrides seed in the file")
    parser.add_argument("--num_ranks", type=int, metavar="N", help="overrides ranks in the file")
    parser.add_argument(
        "--resume", action="store_true", default=None, help="skip finished steps and resume the stopped one"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace finished steps in the folder; without this flag, the run stops if there are any",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check settings, data and models, and print what would run, without writing anything",
    )
    parser.add_argument("--work_dir", metavar="DIR", help="base folder for relative paths (default: current folder)")
    for run in foreign_runs():
        run.add_flags(parser)
    return parser.parse(argv)


def _refuse_rounds(plan: Plan) -> None:
    if plan.rounds is not None:
        raise ThreestepError(
            "--step selects steps, but the file also has rounds, which run after all steps; remove --step or the rounds"
        )


def _chosen_steps(plan: Plan, numbers: Sequence[str]) -> Plan:
    """The steps with these numbers; ThreestepError where the plan has no such step, or one of them needs a model that
    is nowhere yet."""
    by_number = {known_steps()[name].number: name for name in plan.settings}
    mistakes = Mistakes()
    for number in numbers:
        mistakes.require(
            number in by_number,
            f"--step must be one or more of {', '.join(by_number)}, got {number}; choose from these",
        )
    chosen = {name: plan.settings[name] for number, name in by_number.items() if number in numbers}
    for name, settings in chosen.items():
        for flag, earlier in known_steps()[name].inputs.items():
            place = Path(settings[flag])
            mistakes.require(
                earlier is None or earlier in chosen or place != plan.output_dir / earlier / "model" or place.exists(),
                f"--step {known_steps()[name].number} expects {settings[flag]}, which step "
                f"{known_steps()[earlier or name].number} writes; run step {known_steps()[earlier or name].number} "
                "first, or include it in --step",
            )
    mistakes.raise_if_any()
    starts = any(None in known_steps()[name].inputs.values() for name in chosen)
    return dataclasses.replace(plan, settings=chosen, new_model=plan.new_model if starts else None)


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
        mistakes.add(f"{origin}: '{name}' must contain settings, got {section!r}")
        return {}
    mistakes.require(
        name != "shared" or "resume" not in section,
        f"{origin}: 'shared' sets resume, which would resume training in steps that are already finished; set resume "
        "at the top of the file, or pass --resume",
    )
    for setting, where in _WIRED.items():
        mistakes.require(setting not in section, f"{origin}: '{name}' sets {setting}; set {where}")
    return section


def _models(step: str, folder: Path, first_model: str, steps: Sequence[str]) -> dict[str, str]:
    """Paths of the step's models, by flag. steps: that run; a model of another one is the first model."""
    inputs = known_steps()[step].inputs
    return {flag: str(folder / str(name) / "model") if name in steps else first_model for flag, name in inputs.items()}


def _rounds(
    count: int,
    folder: Path,
    common: Mapping[str, Any],
    sections: Mapping[str, dict[str, Any]],
    *,
    models: Mapping[str, Mapping[str, str]],
) -> Any:
    """The rounds after the steps with `models`, of which one may be a reward model."""
    step = known_steps()[ROUND_STEP]
    [first_model] = models[ROUND_STEP].values()
    rewards = [name for name in models if name != ROUND_STEP and None not in known_steps()[name].inputs.values()]
    drawing = dict(sections[DRAWING])
    if rewards:
        drawing.setdefault("reward_model", str(folder / rewards[-1] / "model"))
    return _program_of_rounds().TrainingRounds(count, folder, first_model, common, drawing, sections[ROUND_STEP], step)


def _program_of_rounds() -> Any:
    return plugin_module("evaluation", "best_of.rounds")


def prepared_rounds(
    plan: Plan, resumes: bool, overwrite: bool, configs: Path | None = None
) -> list[tuple[Any, Path, bool]]:
    """The programs of all rounds, each with its file of settings, and whether an earlier run finished it.

    overwrite: remove rounds of an earlier run. configs: folder of the files; OUTPUT_DIR/configs by default.
    ThreestepError for mistakes in the settings, and for rounds that are neither removed nor resumed.
    """
    if plan.rounds is None:
        return []
    place = _program_of_rounds().FOLDER
    folder = plan.output_dir / place
    if overwrite and not resumes:
        remove(folder)
    mistakes, stages = Mistakes(), []
    mistakes.require(
        resumes or not folder.exists(),
        f"{folder} holds rounds of an earlier run; pass --resume to continue them or --overwrite to replace them, or "
        "choose another output_dir",
    )
    mistakes.raise_if_any()
    goes_on = resumes
    for number, stage in enumerate(plan.rounds.stages()):
        path = (configs or plan.output_dir / "configs") / place / f"{number:03d}_{stage.name}.yaml"
        mine, settings = redacted_value(stage.settings), stage.settings
        same = path.exists() and redacted_value({**read_yaml(path), "resume": None}) == {**mine, "resume": None}
        goes_on = goes_on and same and stage.result.exists()
        if stage.name == ROUND_STEP and resumes:
            settings = {**settings, "resume": "latest"}
        check_place("output_dir", path)
        path.write_text(yaml.safe_dump(redacted_value(settings), sort_keys=False, allow_unicode=True), encoding="utf-8")
        stages.append((stage, path, goes_on))
    for stage, path, _ in stages[:4]:  # the others differ in their paths alone
        # The rows to train on are not there yet.
        others = ["--data_path", "embedded"] if stage.name == ROUND_STEP else []
        try:
            parse_arguments(
                stage.groups,
                ["--config", str(path), *others],
                "",
                plan.rounds.step.old_flags,
                unread=plan.rounds.step.set_aside,
            )
        except ThreestepError as problem:
            mistakes.add(f"{stage.name}: {problem}")
    mistakes.raise_if_any()
    return stages


def run_rounds(plan: Plan, stages: Sequence[tuple[Any, Path, bool]], resume_command: str) -> None:
    """Run the programs of the rounds in order; the first that fails ends this program."""
    for stage, path, is_finished in stages:
        if is_finished:
            print(f"\n== {stage.title}: finished before", flush=True)
            continue
        _run(stage.title, stage.module, [*stage.words, "--config", str(path)], plan.ranks, environment=_of_whole_run())
        _end_where_stopped(stage.title, stage.folder, resume_command)


def _table_of_rounds(plan: Plan, stages: Sequence[tuple[Any, Path, bool]]) -> list[str]:
    """Write the figures of the rounds to rounds.json, and return their table; nothing without rounds."""
    if not stages:
        return []
    results = [checked_json(dict[str, Any], read_text(stage.result), stage.result) for stage, _, _ in stages]
    rounds = _program_of_rounds()
    rows = rounds.figures_of([stage for stage, _, _ in stages], results)
    rows = checked_value(list[dict[str, float | None]], rows, f"figures in {plan.output_dir / rounds.FOLDER}")
    RunFolder(plan.output_dir, is_main_rank=True).write_figures("rounds.json", {"rounds": rows})
    return [rounds.table_of(rows)]


def _new_model_flags(section: Mapping[str, Any], common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    names = ("data_path", "dataset_module", "seed")
    inherited = {name: common[name] for name in names if name in common}
    return {**inherited, **section, "out": str(folder / "new_model")}


def _run(
    title: str, module: str, flags: Sequence[str], ranks: int | None, *, environment: Mapping[str, str] | None = None
) -> None:
    """Run one program, or end this program with its exit code."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    code = launch(module, flags, ranks, environment)
    seconds = time.monotonic() - started
    if code != 0:
        print(
            f"error: {title} ({module}) exited with code {code} after {seconds:.0f} seconds; see its messages "
            "above; later steps were not started",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(code)


def _end_where_stopped(title: str, folder: Path, resume_command: str) -> None:
    """End this program if a signal stopped the step: it exits with 0 too, but leaves a checkpoint and no figures."""
    if (folder / "checkpoints" / "latest").exists() and not (folder / "summary.json").exists():
        print(
            f"{title} was stopped and wrote a checkpoint; later steps were not started\nto resume: {resume_command}",
            flush=True,
        )
        sys.exit(0)


if __name__ == "__main__":
    run_program(main, output_is_log=True)
