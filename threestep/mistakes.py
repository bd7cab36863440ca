"""A user's mistake at the border of a Python call: a sentence that names arguments where the program's names flags, and
a traceback that ends at the call."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.arguments import choices_of, defaults_of
from training.utils.flags.step import known_steps
from training.utils.plugins.registry import plugin_module, plugins

# Arguments of TRL's trainers and of the command line, and what to do instead.
_NO_ARGUMENTS = {
    "train_dataset": "pass rows instead",
    "eval_dataset": "pass eval_rows instead",
    "processing_class": "pass tokenizer instead",
    "args": "pass its fields instead, such as learning_rate=1e-5",
    "ref_model": "remove it; the reference is the model that the run starts from",
    "value_model": "remove it; the critic starts from reward_model",
    "formatting_func": "pass formatted rows instead: [{'text': formatting_func(row)} for row in rows]",
    "compute_metrics": "pass callback instead, a function (step, figures) that may return more figures",
    "callbacks": "pass callback instead, a function (step, figures)",
    "data_collator": "remove it; rows are packed without padding",
    "optimizers": "pass optimizer, learning_rate and lr_scheduler_type instead",
    "quantization_config": "pass load_in_4bit=True or load_in_8bit=True instead",
    "data_path": "pass rows instead",
    "model_name_or_path": "pass model instead",
    "actor_model_name_or_path": "pass model instead",
    "critic_model_name_or_path": "pass reward_model instead",
}
VARIABLE = "THREESTEP_TRACEBACK"  # set: mistakes keep the traceback of the program
# Arguments that are flags by another name.
_ARGUMENTS = {
    "model_name_or_path": "model", "actor_model_name_or_path": "model", "critic_model_name_or_path": "reward_model",
    "data_path": "rows", "out": "folder",
}  # fmt: skip
_NEITHER = ("num_ranks", "config")  # flags that are no step's
# `--name`, the word before it, and the word behind it, if it may be a value.
_FLAG = re.compile(r"(?:(?P<before>\w+) )?--(?P<name>[a-z]\w*)(?:[ =](?P<value>'[^']*'|[^\s,;:()]*[^\s,;:().]))?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SWITCHED = {"true": "True", "false": "False"}
_ADVICE = ("give", "pass", "set", "or", "take", "by", "with", "use", "add")  # before a switch that is to be on

Taken = ParamSpec("Taken")
Returned = TypeVar("Returned")


def mistakes_in_python(call: Callable[Taken, Returned]) -> Callable[Taken, Returned]:
    """A call, named as a step (`sft`, ...), `evaluate` or `new_model`, whose ThreestepErrors name its arguments, with a
    traceback of the call alone unless `VARIABLE` is set. Other exceptions pass through."""

    @functools.wraps(call)
    def called(*given: Taken.args, **settings: Taken.kwargs) -> Returned:
        cause, mistakes = None, Mistakes()
        for name in filter(_NO_ARGUMENTS.__contains__, settings):
            mistakes.add(f"unknown argument {name}; {_NO_ARGUMENTS[name]}")
        mistakes.raise_if_any()
        signature = inspect.signature(call)
        try:
            signature.bind(*given, **settings)
        except TypeError as problem:
            shown = ", ".join(
                each.name for each in signature.parameters.values() if each.kind == each.POSITIONAL_OR_KEYWORD
            )
            called_as = f"threestep.{call.__name__}({shown}, name=value, ...)"
            raise ThreestepError(f"{problem}; call it as {called_as}") from None
        try:
            return call(*given, **settings)
        except ThreestepError as mistake:
            sentence = in_python(str(mistake), call.__name__, settings)
            cause = mistake if os.environ.get(VARIABLE) else None
        # Out here, the error has no context, whose frames would hold the run's models.
        raise ThreestepError(sentence) from cause

    return called


def in_python(sentence: str, kind: str, settings: Mapping[str, Any]) -> str:
    """The sentence with arguments in the place of flags: output_dir, overwrite=True, advantage='gae'.

    kind: of the step, new_model or evaluate. settings: of the call; a word behind a flag that is neither one of these,
        nor a number, a choice, a default, quoted or the last in parentheses is the sentence's
    """
    groups = _groups(kind)
    defaults, choices = defaults_of(groups), choices_of(groups)

    def argument(found: re.Match[str]) -> str:
        before, name, value = found["before"], found["name"], found["value"]
        if name not in defaults and name not in _NEITHER and name not in settings:
            return found[0]
        shown = f"{before} " if before else ""
        shown += _ARGUMENTS.get(name, name)
        known = {str(defaults.get(name)), str(settings.get(name)), *choices.get(name, ())}
        is_whole = found.string[: found.start()].endswith("(") and found.string[found.end() :].startswith(")")
        given = None if value is None else _given(value, known | {value} if is_whole else known)
        if given is not None:
            return f"{shown}={given}"
        is_switch = isinstance(defaults.get(name), bool) or name == "resume"
        on = "=True" if is_switch and before in _ADVICE else ""
        return shown + on + found[0].partition(f"--{name}")[2]

    # Between backquotes stand commands of a shell.
    parts = sentence.split("`")
    parts[::2] = [_FLAG.sub(argument, part.replace("unknown flag --", "unknown argument --")) for part in parts[::2]]
    # A suggestion may be another program's name.
    return re.sub(r"'--(?=\w)", "'", "`".join(parts))


def _groups(kind: str) -> Sequence[type]:
    """The groups of the call's flags."""
    for step in known_steps().values():
        if step.kind == kind:
            return step.groups
    plugin = {"new_model": "programs", "evaluate": "evaluation"}.get(kind, "")
    return plugin_module(plugin, kind).GROUPS if plugin in plugins() else ()


def _given(value: str, known: set[str]) -> str | None:
    """A word as the value of an argument; None if it is none. known: values of it"""
    if value in _SWITCHED:
        return _SWITCHED[value]
    if _NUMBER.fullmatch(value) or value.startswith("'") or (value.isupper() and value.isalpha()):
        return value
    return repr(value) if value in known or value.startswith("/") else None
