"""Settings from a YAML file and flags into dataclasses, strictly.

`--config run.yaml` sets, flags override. An unknown key or flag is an error that names its nearest
relatives. The dataclasses hold the defaults; this module knows none of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from training.utils.run.deepspeed_chat import OldFlag, translated
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names
from training.utils.run.metrics import say


def parse_arguments(
    groups: Sequence[type], argv: Sequence[str], description: str, old_flags: Mapping[str, OldFlag] | None = None
) -> tuple[Any, ...]:
    """Return one instance of each dataclass in `groups`, filled from `--config` and flags.

    old_flags: DeepSpeed-Chat's that have no namesake among the groups; each of them in `argv` is said in one line.
    Every group that has a `validate(mistakes)` method is asked for its mistakes; all of them are raised
    together. Raises ThreestepError for unknown names, wrong types and mistakes; exits for `--help`.
    """

    class StrictParser(_dataclass_parser()):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ThreestepError(f"in the command line or the configuration: {message}")

    parser = StrictParser(
        list[Any](groups),
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", default=None, metavar="FILE", help="YAML file of settings; flags override it")
    # The DeepSpeed launcher passes --local_rank unless told not to; the rank itself comes from the environment.
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)

    argv, lines = translated(argv, old_flags or {})
    for line in lines:
        say(line, is_main_rank=os.environ.get("RANK", "0") == "0")
    config_path = _config_path(argv)
    config_flags: list[str] = []
    if config_path is not None:
        # The path at the end parts a list of the file from what the command line begins with.
        config_flags = [*_flags_of(read_yaml(config_path), parser, config_path), f"--config={config_path}"]
    for word in (*config_flags, *argv):
        if word == "--" or (word.startswith("--") and word.partition("=")[2] == "--"):  # argparse reads it as nothing
            raise ThreestepError(f"in the command line or the configuration: '{word}': '--' is no value; leave it out")
    namespace, unknown = parser.parse_known_args([*config_flags, *argv])
    _refuse_unknown_flags(unknown, parser)

    instances = tuple(_instance(group, namespace) for group in groups)
    mistakes = Mistakes()
    for instance in instances:
        if hasattr(instance, "validate"):
            instance.validate(mistakes)
    mistakes.raise_if_any()
    return instances


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in the YAML file at `path`; ThreestepError where it is missing or no mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise ThreestepError(f"cannot read the configuration {path}: {problem.strerror}") from problem
    except ValueError as problem:  # bytes that are no text, or a path that no system takes
        raise ThreestepError(f"cannot read the configuration {path}: expected UTF-8 text: {problem}") from problem
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # ValueError: a date that is none, a long number
        raise ThreestepError(f"{path} is not valid YAML: {' '.join(str(problem).split())}") from problem
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ThreestepError(f"{path}: expected 'name: value' lines, got a {type(values).__name__}")
    return values


def resolved_settings(instances: Sequence[Any]) -> dict[str, Any]:
    """Return every value of the parsed groups under its flag's name."""
    values: dict[str, Any] = {}
    for instance in instances:
        for name, value in dataclasses.asdict(instance).items():
            if name in values and values[name] != value:
                raise AssertionError(f"two argument groups share the name {name}")
            values[name] = value
    return values


def _dataclass_parser() -> Any:
    """transformers' HfArgumentParser. Its file is read alone, for it imports nothing of transformers, whose own import
    takes a second: --help and mistakes are answered without it."""
    package = importlib.util.find_spec("transformers")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "hf_argparser.py"
        spec = importlib.util.spec_from_file_location("hf_argparser", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.HfArgumentParser
    from transformers import HfArgumentParser

    return HfArgumentParser


def _config_path(argv: Sequence[str]) -> str | None:
    class Finder(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:  # by itself it prints, and exits
            raise ThreestepError("--config expects a file's path after it")

    finder = Finder(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=None)
    known, _ = finder.parse_known_args(list(argv))
    return known.config


def _flags_of(values: dict[str, Any], parser: argparse.ArgumentParser, path: str) -> list[str]:
    """Spell YAML values as flags, so that files and flags are checked by the same rules."""
    names = [name for name in _names(parser) if name not in ("config", "help", "h", "local_rank")]
    flags: list[str] = []
    mistakes = Mistakes()
    for name, value in values.items():
        if name not in names:
            mistakes.add(f"{path}: unknown setting '{name}'{nearest_names(str(name), names)}")
        elif isinstance(value, dict):
            mistakes.add(f"{path}: '{name}' expects one value or a list, got a mapping")
        elif value is None:
            continue  # "name:" without a value keeps the default
        elif isinstance(value, list):
            flags += [f"--{name}", *(str(item) for item in value)] if value else []
        elif isinstance(value, bool):
            flags += [f"--{name}", "true" if value else "false"]
        else:
            flags += [f"--{name}={value}"]
    mistakes.raise_if_any()
    return flags


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def _refuse_unknown_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> None:
    mistakes = Mistakes()
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].split("=")[0]
            mistakes.add(f"unknown flag --{name}{nearest_names(name, _names(parser))}")
    if unknown and not mistakes.sentences:
        mistakes.add(f"the command line holds words that belong to no flag: {' '.join(unknown)}")
    mistakes.raise_if_any()


def _instance(group: type, namespace: argparse.Namespace) -> Any:
    names = [field.name for field in dataclasses.fields(group) if field.init]
    return group(**{name: getattr(namespace, name) for name in names})
