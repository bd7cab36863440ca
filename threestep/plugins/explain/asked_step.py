"""A step that a user asks about, by the command or from Python: its records, tokenizer and rows, and the questions."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.audit.bisect.rerun import starter
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.reading import read_settings
from threestep.plugins.explain.explanation import Explanation, KnownOfRun, Questions, explain
from threestep.plugins.explain.forward.model import media_scale
from threestep.plugins.explain.held_out import read_held_out
from threestep.plugins.explain.places import places_of_step
from threestep.plugins.explain.records import is_record, run_of, steps_of_run, whole_record
from threestep.plugins.explain.rule_runs import run_under
from threestep.plugins.explain.rules import OtherRule, rule_of
from training.utils.base.errors import ThreestepError
from training.utils.base.reading import checked_json, read_text
from training.utils.base.user_files import load_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PROBE = "What is 2 + 3?"
_TOKENIZER = "tokenizer_config.json"
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
    run again. trust_run: the run's code may be run, and its addresses opened."""

    run: Path
    step: int = 0
    update: int = 1
    last: int = 1
    held_out: str = ""
    rules: AskedRules = AskedRules()
    plain: bool = False
    tokenizer: str | None = None
    work: Path = Path("again")
    trust_run: bool = False


def explanation_of(asked: AskedStep) -> Explanation:
    """Read or repeat the steps, and explain the last. ThreestepError for what cannot be explained."""
    _check(asked)
    if is_record(asked.run):
        steps = [whole_record(asked.run)]
    else:
        start = starter(None) if asked.trust_run else None
        numbers = range(asked.step - asked.last + 1, asked.step + 1)
        steps = steps_of_run(asked.run, numbers, asked.update, work=asked.work.resolve(), start=start)
    settings = read_settings(run_of(asked.run) / "config.yaml")
    tokenizer = _tokenizer(asked, settings)
    scale = media_scale(_models(run_of(asked.run), settings))
    known = KnownOfRun(_decoder(tokenizer), *places_of_step(steps, settings, trusts_run=asked.trust_run), scale=scale)
    try:
        return explain(steps, _questions(asked, steps[-1], tokenizer), known)
    except LackingError as lacking:
        raise ThreestepError(f"{asked.run} cannot be explained: the record lacks {lacking.args[0]}") from lacking
    except ArithmeticError as problem:  # numbers and settings that no optimizer has
        raise ThreestepError(
            f"{asked.run} cannot be explained: a computation with its numbers failed ({problem})"
        ) from problem


def _check(asked: AskedStep) -> None:
    """ThreestepError for a folder that is neither, and for numbers that do not fit."""
    run, record = asked.run, is_record(asked.run)
    if not run.is_dir():
        raise ThreestepError(f"{run} is not a folder; pass the folder of a run, or of a record in one")
    if record and (asked.step or asked.last > 1):
        raise ThreestepError(f"--step and --last are for a run, but {run} is the record of one step; remove them")
    if not record and asked.step < 1:
        raise ThreestepError(f"--step expects a step of {run}, 1 or later, got {asked.step}")
    if not 1 <= asked.last <= max(1, asked.step):
        raise ThreestepError(
            f"--last expects 1 to {max(1, asked.step)}, since there are no earlier steps, got {asked.last}"
        )
    if asked.rules.are_run and not (asked.rules.settings and asked.update == 1):
        raise ThreestepError("--run_rules needs --with, and the first optimizer step of a rollout (--update 1)")
    if asked.rules.are_run and not asked.trust_run:
        raise ThreestepError(
            f"--run_rules reruns {run} with its own settings and code; add --trust_run if you trust the run"
        )
    if asked.last > 1 and not asked.held_out:
        raise ThreestepError(
            "--last ranks sequences by their effect on --held_out, but --held_out is not set; add it, or remove --last"
        )


def _questions(asked: AskedStep, step: AuditedStep, tokenizer: Any) -> Questions:
    rules = [_rule(asked, step, said) for said in asked.rules.settings]
    rules += [OtherRule(f"without {row}", {}, (row,)) for row in asked.rules.without]
    masks = {said: load_function(said, "--with_mask") for said in asked.rules.masks}
    if not asked.held_out:
        return Questions(None, False, rules, masks, asked.plain)

    def tokenize(text: str) -> list[int]:
        if tokenizer is None:
            raise ThreestepError("--held_out with text needs a tokenizer; set --tokenizer, or use lines with `ids`")
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


def _tokenizer(asked: AskedStep, settings: Mapping[str, Any]) -> Any:
    """The tokenizer that is named, or the run's; None without one."""
    given, run = asked.tokenizer, run_of(asked.run)
    for place in [Path(given)] if given else _models(run, settings):
        if os.path.lexists(place / _TOKENIZER):
            return _read_tokenizer(place, asked.trust_run and settings.get("trust_remote_code") is True)
    if given:
        raise ThreestepError(f"--tokenizer expects a folder with a tokenizer, got {given}")
    return None


def _read_tokenizer(place: Path, trust_remote_code: bool) -> Any:
    """Read a tokenizer. ThreestepError for a damaged one, and for one with code of its own that is not trusted."""
    from training.utils.loading.configurations import errors_explained
    from training.utils.loading.tokenizers import read_tokenizer

    about: dict[str, Any] = checked_json(dict[str, Any], read_text(place / _TOKENIZER), place / _TOKENIZER)
    if about.get("auto_map") and not trust_remote_code:
        raise ThreestepError(
            f"the tokenizer in {place} has its own Python code, which is not run by default; choose another with "
            "--tokenizer, or add --trust_run if you trust the run, which ran this code (trust_remote_code)"
        )
    with errors_explained("tokenizer", str(place), Exception):  # transformers raises many kinds
        tokenizer = read_tokenizer(place, trust_remote_code)[0]
        tokenizer.decode(tokenizer(_PROBE)["input_ids"])  # damaged files are read, and fail when they are used
    return tokenizer


def _models(run: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The folders of the run's model: as it was saved, and as it began."""
    began = (settings.get(name) for name in _MODELS)
    return [run / "model", *(Path(name) for name in began if name and isinstance(name, str))]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
