"""A step that a user asks about, by the command or from Python: its records, tokenizer and rows, and the questions."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.audit.bisect.rerun import starter
from training.audit.quantities.step import AuditedStep, LackingError
from training.explain.explanation import Explanation, KnownOfRun, Questions, explain
from training.explain.forward.model import media_scale
from training.explain.held_out import read_held_out
from training.explain.records import is_record, run_of, steps_of_run, whole_record
from training.explain.rule_runs import run_under
from training.explain.rules import OtherRule, rule_of
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_yaml
from training.utils.base.user_files import load_function
from training.utils.data.sources.arguments import SourceArguments
from training.utils.data.sources.create import create_raw_dataset
from training.utils.data.sources.file_dataset import FileDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MODELS = ("model_name_or_path", "actor_model_name_or_path")


@dataclass(frozen=True)
class AskedRules:
    """Other rules, as --with, --without_row and --with_mask have them. are_run: --with by the run's own program."""

    settings: tuple[str, ...] = ()
    without: tuple[int, ...] = ()
    masks: tuple[str, ...] = ()
    are_run: bool = False


@dataclass(frozen=True)
class AskedStep:
    """run: a run's folder, or a record's. step, update: of a run. last: steps whose sequences are ordered. held_out: a
    file. plain: shares along plain gradient descent too. tokenizer: a folder; None: the run's. work: where steps are
    run again."""

    run: Path
    step: int = 0
    update: int = 1
    last: int = 1
    held_out: str = ""
    rules: AskedRules = AskedRules()
    plain: bool = False
    tokenizer: str | None = None
    work: Path = Path("runs/explained/again")


def explanation_of(asked: AskedStep) -> Explanation:
    """Read or repeat the steps, and explain the last. ThreestepError for what cannot be explained."""
    _check(asked)
    if is_record(asked.run):
        steps = [whole_record(asked.run)]
    else:
        numbers = range(asked.step - asked.last + 1, asked.step + 1)
        steps = steps_of_run(asked.run, numbers, asked.update, work=asked.work.resolve(), start=starter(None))
    settings = _settings(run_of(asked.run))
    tokenizer = _tokenizer(asked.tokenizer, run_of(asked.run), settings)
    scale = media_scale(_models(run_of(asked.run), settings))
    known = KnownOfRun(_decoder(tokenizer), *_places(steps, settings), scale=scale)
    try:
        return explain(steps, _questions(asked, steps[-1], tokenizer), known)
    except LackingError as lacking:
        raise ThreestepError(f"{asked.run} cannot be explained: the record lacks {lacking.args[0]}") from lacking


def _check(asked: AskedStep) -> None:
    """ThreestepError for a folder that is neither, and for numbers that do not fit."""
    run, record = asked.run, is_record(asked.run)
    if not run.is_dir():
        raise ThreestepError(f"{run} expects the folder of a run, or of a record in it, and is no folder")
    if record and (asked.step or asked.last > 1):
        raise ThreestepError(f"--step and --last are of a run, and {run} is the record of one step; leave them out")
    if not record and asked.step < 1:
        raise ThreestepError(f"--step expects a step of {run}, from 1, got {asked.step}")
    if not 1 <= asked.last <= max(1, asked.step):
        raise ThreestepError(f"--last expects 1 to {max(1, asked.step)}, the steps that there are, got {asked.last}")
    if asked.rules.are_run and not (asked.rules.settings and asked.update == 1):
        raise ThreestepError("--run_rules expects --with, and the first optimizer step of a rollout (--update 1)")
    if asked.last > 1 and not asked.held_out:
        raise ThreestepError("--last orders sequences by what they taught --held_out, and no file is given")


def _questions(asked: AskedStep, step: AuditedStep, tokenizer: Any) -> Questions:
    rules = [_rule(asked, step, said) for said in asked.rules.settings]
    rules += [OtherRule(f"without {row}", {}, (row,)) for row in asked.rules.without]
    masks = {said: load_function(said, "--with_mask") for said in asked.rules.masks}
    if not asked.held_out:
        return Questions(None, False, rules, masks, asked.plain)

    def tokenize(text: str) -> list[int]:
        if tokenizer is None:
            raise ThreestepError("--held_out with texts expects a tokenizer: give --tokenizer, or lines with `ids`")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    held = read_held_out(Path(asked.held_out), tokenize, getattr(tokenizer, "eos_token_id", None))
    return Questions(held, True, rules, masks, asked.plain)


def _rule(asked: AskedStep, step: AuditedStep, said: str) -> OtherRule:
    rule = rule_of(said, step.head.objective)
    if not asked.rules.are_run:
        return rule
    number = asked.rules.settings.index(said) + 1
    work = asked.work.resolve().with_name(f"{asked.work.name}_rule_{number}")
    ran = run_under(step, run_of(asked.run), said, work=work, start=starter(None))
    return replace(rule, name=f"{said}, run", ran=ran)


def _settings(run: Path) -> dict[str, Any]:
    """The run's settings; {} where it left none."""
    config = run / "config.yaml"
    return (parse_yaml(config.read_text("utf-8")) or {}) if config.is_file() else {}


def _places(steps: Sequence[AuditedStep], settings: dict[str, Any]) -> tuple[dict[int, str], str]:
    """The places in the data of the steps' rows, and why there are none."""
    rows = {int(row) for step in steps if step.has("rows") for row in step.tensor("rows")}
    return places_of_rows(rows, settings, steps[-1].head.objective) if rows else ({}, "")


def places_of_rows(rows: Iterable[int], settings: Mapping[str, Any], objective: str) -> tuple[dict[int, str], str]:
    """Return where each row stands; and why that is not known, where the data cannot be read again.

    settings: of the run's config.yaml. A row's number counts the rows of all datasets, one after the other, those for
    evaluation with them (training.utils.data.build.portions).
    """
    wanted, found, first = sorted(set(rows)), dict[int, str](), 0
    own = {field.name: settings[field.name] for field in fields(SourceArguments) if field.name in settings}
    names = [*(own.get("data_path") or ()), *((own.get("sft_only_data_path") or ()) if objective == "sft" else ())]
    try:
        cache = str(settings.get("data_output_path") or "")
        sources = [create_raw_dataset(name, SourceArguments(**own), cache, 0) for name in names]
        if not any(isinstance(source, FileDataset) for source in sources):
            return {}, ""  # the row's number says as much, and these may be long in the making
        for name, source in zip(names, sources, strict=True):
            for part in (source.get_train_data(), source.get_eval_data() or ()):
                for row in wanted:
                    if first <= row < first + len(part):
                        found[row] = getattr(part[row - first], "where", f"{name}, row {row - first}")
                first += len(part)
    except (ThreestepError, OSError) as problem:
        return {}, f"which files and lines the rows come from is not known: {problem}"
    return found, ""


def _tokenizer(given: str | None, run: Path, settings: dict[str, Any]) -> Any:
    """The tokenizer that is named, or the run's; None without one."""
    for place in [Path(given)] if given else _models(run, settings):
        if (place / "tokenizer_config.json").is_file():
            from training.utils.models.families.tokenizer_files import read_tokenizer

            return read_tokenizer(place)[0]
    if given:
        raise ThreestepError(f"--tokenizer expects a folder with a tokenizer, got {given}")
    return None


def _models(run: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The folders of the run's model: as it was saved, and as it began."""
    return [run / "model", *(Path(settings[name]) for name in _MODELS if settings.get(name))]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
