"""Settings from a YAML file and flags into dataclasses, strictly.

`--config run.yaml` sets, flags override. Unknown keys and flags fail, with suggestions. The dataclasses hold the
defaults; this module knows none of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from training.utils.base.console import log_on_main, typed_command
from training.utils.base.credentials import ADDRESSES_VARIABLE, hide, redacted_value, restored
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.storage import MOST_YAML_CHARACTERS, MOST_YAML_VALUES, WrittenOutTooLong, parse_yaml
from training.utils.base.user_files import named_object
from training.utils.flags.flags import (
    AUTO,
    MAY_CHANGE,
    TAKES_AUTO,
    UNIT,
    VALUES,
    AutoChoice,
    Range,
    chosen_in,
    default_of,
    flag_in,
    nearest_flags,
    note_mistakes,
    sentence,
)
from training.utils.flags.help_page import HELP_FLAGS, as_typed, help_page, requested_topic
from training.utils.plugins.registry import added, owner_sentence, read_other_names

_SWITCHED = {"true": True, "false": False}
_TRUTHS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True), **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}  # fmt: skip


class ProgramParser(argparse.ArgumentParser):
    """The flags of a small program. Unknown ones fail, with suggestions; every mistake is a ThreestepError."""

    def __init__(self, program: str, description: str, epilog: str | None = None) -> None:
        typed = typed_command() or f"python -m {program}"
        super().__init__(
            prog=typed,
            description="\n".join(as_typed(description, typed)),
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ThreestepError(f"{self.prog}: {message}; see --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Read the flags. A switch may have `true` or `false` behind it, as the steps' flags may."""
        words, off = self._without_values_of_switches(_with_credentials(argv))
        options, unknown = self.parse_known_args(words)
        _refuse_unknown_flags(unknown, self)
        for switch in off:
            setattr(options, switch, False)
        return options

    def _without_values_of_switches(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words with each switch that is on bare, and those that are off left out; and the names of the
        latter."""
        switches = {
            name: action.dest for action in self._actions if action.const is True for name in action.option_strings
        }
        words, off, rest = [], [], list(argv)
        while rest:
            word = rest.pop(0)
            name, has_value, value = word.partition("=")
            if name in switches and not has_value and rest and rest[0].lower() in _SWITCHED:
                has_value, value = "=", rest.pop(0)
            if name not in switches or not has_value or value.lower() not in _SWITCHED:
                words.append(word)
            elif _SWITCHED[value.lower()]:
                words.append(name)
            else:
                off.append(switches[name])
        return words, off


def _program() -> str:
    """The command that started this program, as one types it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    started = Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    return typed_command() or started


class _GroupsParser(argparse.ArgumentParser):
    """The flags of dataclasses. Every mistake is a ThreestepError that names the flag."""

    def __init__(self, parts: Sequence[type]) -> None:
        super().__init__(prog=_program(), add_help=False, allow_abbrev=False)
        self._fields: dict[str, dataclasses.Field] = {}
        for part in parts:
            kinds = typing.get_type_hints(part)
            for field in dataclasses.fields(part):
                self._add_flag(field, kinds[field.name])

    def error(self, message: str) -> NoReturn:
        found = re.fullmatch(r"argument --(\w+)\S*: (.*)", message, re.DOTALL)
        name, said = found.groups() if found else ("", message)
        if name in self._fields and said.startswith("expected "):  # one argument, or at least one
            values = self._fields[name].metadata.get(VALUES)
            words = f"one of {', '.join(values)}" if values and not isinstance(values, Range) else values or "a value"
            said = f"--{name} expects {words}{_unit(self._fields[name])}, got nothing; write a value after the flag"
        raise ThreestepError(
            said if said.startswith("--") else f"on the command line or in the configuration file: {message}"
        )

    def _add_flag(self, field: dataclasses.Field, kind: Any) -> None:
        kind = next((each for each in typing.get_args(kind) if each is not type(None)), kind)  # of a list: its items'
        default = default_of(field)
        keywords = {key: field.metadata[key] for key in ("nargs", "const") if key in field.metadata}
        if isinstance(default, list):
            keywords = {"nargs": "+"}
        elif kind is bool and (default is not None or field.metadata.get(TAKES_AUTO)):
            keywords = {"nargs": "?", "const": True}
        self._fields[field.name] = field
        names = [f"--{name}" for name in dict.fromkeys((field.name, field.name.replace("_", "-")))]
        names += field.metadata.get("aliases", ())
        self.add_argument(*names, type=_reader(field, kind), default=default, **keywords)
        if default is True:
            off = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
            self.add_argument(*off, action="store_false", dest=field.name)

    def read_model_files(self, values: argparse.Namespace) -> None:
        """Put folders in the place of models in files that plugins read (`model_files`)."""
        for name, field in self._fields.items():
            given = getattr(values, name)
            if given and field.metadata.get(UNIT) in ("model", "tokenizer"):
                for as_folder in map(named_object, added("model_files", ()).values()):
                    given = [as_folder(each) for each in given] if isinstance(given, list) else as_folder(given)
                setattr(values, name, given)


def _reader(field: dataclasses.Field, kind: type) -> Callable[[str], Any]:
    """Return what reads a word as the value of a flag; argparse names its ArgumentTypeError."""
    takes_auto = field.metadata.get(TAKES_AUTO)

    def read(word: str) -> Any:
        if takes_auto and word == AUTO:
            return None
        try:
            return _TRUTHS[word.lower()] if kind is bool else kind(word)
        except (KeyError, ValueError):
            expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            expected += f", or {AUTO}" if takes_auto else ""
            got = word if kind is bool else repr(word)
            raise argparse.ArgumentTypeError(f"--{field.name} expects {expected}{_unit(field)}, got {got}") from None

    return read


def _unit(field: dataclasses.Field) -> str:
    unit = field.metadata.get(UNIT)
    return f" ({unit})" if unit and unit not in field.name else ""


def parse_arguments(
    groups: Sequence[type],
    argv: Sequence[str],
    description: str,
    old_flags: Mapping[str, Any] | None = None,
    *,
    first_flags: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
    unread: Collection[str] = (),
) -> tuple[Any, ...]:
    """Return one instance of each dataclass in `groups`, filled from `--config` and flags.

    old_flags: names of other programs, on the command line and in the file, as a plugin's `OtherNames` reads them;
        each that is read is a line of the log.
    refused: flags that it does not have, with the ends of sentences that say why.
    unread: flags of other steps, which are set aside with a line of the log.
    description, first_flags: of the page for `--help` (`help_page`).
    Raises one ThreestepError with all unknown names or wrong types, or with the mistakes of all groups that have a
    `validate(mistakes)` or `validate_beside(settings of all groups, mistakes)`. Exits for `--help`.
    """
    old_flags, refused = old_flags or {}, refused or {}
    parts = [part for group in groups for part in _parts(group)]
    wanted = requested_topic(argv)
    if wanted is not None:
        words = {flag_in(word)[2:]: after for word, after in itertools.pairwise(argv) if not flag_in(after)}
        shown = {each.name: each.value for each in _defaults_beside(parts, {**defaults_of(parts), **words})} | words
        sys.stdout.write(help_page(parts, _program(), description, wanted, first_flags=first_flags, shown=shown))
        sys.exit(0)

    parser = _GroupsParser(parts)
    parser.add_argument(*HELP_FLAGS, action="store_true")  # for the names that are suggested
    parser.add_argument("--config", default=None)
    # The DeepSpeed launcher passes --local_rank unless told not to; the rank itself comes from the environment.
    parser.add_argument("--local_rank", type=int, default=-1)

    config_path = _config_path(argv)
    config_flags: list[str] = []
    if config_path is not None:
        values = read_yaml(config_path)
        is_resumed = _is_resumed(values, argv)
        values = _without_choices(values, config_path) if is_resumed else values
        others, suggested = {*old_flags, *unread}, _read_as_others(old_flags)
        settings = _flags_of(values, parser, config_path, others, suggested=suggested, may_be_older=is_resumed)
        # The path at the end separates a list in the file from the first words of the command line.
        config_flags = [*settings, f"--config={config_path}"]
    config_flags, argv = _in_our_names(config_flags, argv, old_flags, refused)
    config_flags, argv = _set_aside(config_flags, argv, unread)
    config_flags, argv = _with_credentials(config_flags, overridden_by=argv), _with_credentials(argv)
    config_flags, argv = (_without_commas(words, parts) for words in (config_flags, argv))
    for word in (*config_flags, *argv):
        if word == "--" or (word.startswith("--") and word.partition("=")[2] == "--"):  # argparse would drop it
            parser.error(f"'{word}': '--' is not a value; leave it out")
    namespace, unknown = parser.parse_known_args([*config_flags, *argv])
    _refuse_unknown_flags(unknown, parser, _read_as_others(old_flags))
    given = set(map(flag_in, (*config_flags, *argv)))
    chosen = [each for each in _defaults_beside(parts, vars(namespace)) if f"--{each.name}" not in given]
    vars(namespace).update({each.name: each.value for each in chosen})
    if chosen:
        log_on_main(sentence(chosen))
    _check(tuple(_instance(group, namespace) for group in groups))
    parser.read_model_files(namespace)
    return tuple(_instance(group, namespace) for group in groups)


def _defaults_beside(parts: Sequence[type], values: Mapping[str, Any]) -> list[AutoChoice]:
    """The defaults that depend on other flags. values: of all flags"""
    return [each for part in parts if hasattr(part, "defaults_beside") for each in part.defaults_beside(values)]


def _check(instances: Sequence[Any]) -> None:
    """ThreestepError with all mistakes in the values of flags."""
    mistakes = Mistakes()
    for instance in instances:
        note_mistakes(instance, mistakes)
    for instance in instances:
        if hasattr(instance, "validate_beside"):
            instance.validate_beside(resolved_settings(instances), mistakes)
    mistakes.raise_if_any()


def _without_commas(words: Sequence[str], groups: Sequence[type]) -> list[str]:
    """The words with `1,10` as `1 10` behind flags that take several whole numbers."""
    lists = {f"--{each.name}" for _, each in _fields(groups) if str(each.type) == "list[int]"}
    found: list[str] = []
    takes_numbers = False
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            takes_numbers = name in lists
            found += [name, *value.split(",")] if takes_numbers and equals else [word]
        else:
            found += word.split(",") if takes_numbers else [word]
    return found


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in the YAML file at `path`; ThreestepError if it is missing or not a mapping."""
    import yaml

    try:
        size = Path(path).stat().st_size
        text = "" if size > MOST_YAML_CHARACTERS else Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise ThreestepError(f"cannot read the configuration file {path}: {problem.strerror}") from problem
    except ValueError as problem:  # bytes that are not text, or an invalid path
        raise ThreestepError(f"cannot read the configuration file {path} as UTF-8: {problem}") from problem
    if size > MOST_YAML_CHARACTERS:
        raise ThreestepError(
            f"{path}: expected a configuration file of at most {MOST_YAML_CHARACTERS >> 20} MiB, got {size:,} bytes; "
            "pass a settings file"
        )
    try:
        values = parse_yaml(text)
    except WrittenOutTooLong as problem:
        raise ThreestepError(
            f"{path}: expected at most {MOST_YAML_VALUES:,} values, got more after expanding aliases (*name), or an "
            "alias that contains itself; write the values out"
        ) from problem
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: an invalid date, a long number
        raise ThreestepError(f"{path} is not valid YAML: {' '.join(str(problem).split())}") from problem
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ThreestepError(f"{path}: expected 'name: value' lines, got a {type(values).__name__}")
    return values


def resolved_settings(instances: Sequence[Any]) -> dict[str, Any]:
    """Return every value of the parsed groups by its flag's name, without credentials: for files and comparisons."""
    values: dict[str, Any] = {}
    for instance in instances:
        members = [getattr(instance, name) for name in _members(type(instance))]  # type: ignore[arg-type]
        own = resolved_settings(members) if members else dataclasses.asdict(instance)
        for name, value in own.items():
            if name in values and values[name] != redacted_value(value):
                raise AssertionError(f"two argument groups share the name {name}")
            values[name] = redacted_value(value)
    return values


def defaults_of(groups: Sequence[type]) -> dict[str, Any]:
    """Every flag of `groups` with its default."""
    return {each.name: default_of(each) for _, each in _fields(groups)}


def choices_of(groups: Sequence[type]) -> dict[str, tuple[str, ...]]:
    """The names that each flag of `groups` which takes one of several takes."""
    fields = {each.name: each.metadata.get(VALUES) for _, each in _fields(groups)}
    return {name: tuple(values) for name, values in fields.items() if values and not isinstance(values, Range)}


def may_change_in(groups: Sequence[type]) -> frozenset[str]:
    """The flags of `groups` that a resumed run may change."""
    fields = _fields(groups)
    return frozenset(
        each.name for part, each in fields if each.metadata.get(MAY_CHANGE) or getattr(part, MAY_CHANGE, False)
    )


def _fields(groups: Sequence[type]) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every flag, with its group."""
    return ((part, each) for group in groups for part in _parts(group) for each in dataclasses.fields(part))


def _in_our_names(
    config_flags: Sequence[str], argv: Sequence[str], old_flags: Mapping[str, Any], refused: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Both with other programs' flags in today's names, and what these take by default. Logs what was read how.
    ThreestepError for flags that are refused, all at once."""
    mistakes = Mistakes()
    for word in (*config_flags, *argv):
        flag = flag_in(word)
        mistakes.require(flag not in refused, f"{flag} {refused.get(flag)}")
    mistakes.raise_if_any()
    settings, words, lines = read_other_names(config_flags, argv, old_flags)
    for line in lines:
        log_on_main(line)
    return settings, words


def _with_credentials(words: Sequence[str], overridden_by: Sequence[str] = ()) -> list[str]:
    """The words with whole addresses in the places of redacted ones; ThreestepError where nobody gives one. What is
    secret in them is printed no more. overridden_by: words whose flags take the place of these."""
    overridden = {word.partition("=")[0] for word in overridden_by if word.startswith("--")}
    whole, name = [], "the command line"
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        name = flag or name
        found = value if name in overridden else restored(value, os.environ)
        if found is None:
            raise ThreestepError(
                f"{name}: the credentials in '{value}' are not saved; pass the full address with {name}, or in the "
                f"variable {ADDRESSES_VARIABLE} (one address per line)"
            )
        whole.append(f"{flag}{equals}{found}")
    hide(whole)
    return whole


def _config_path(argv: Sequence[str]) -> str | None:
    try:
        return _value_in(argv, "--config")
    except argparse.ArgumentError as problem:
        raise ThreestepError("--config expects a file path after it") from problem


def _set_aside(
    config_flags: Sequence[str], argv: Sequence[str], unread: Collection[str]
) -> tuple[list[str], list[str]]:
    """Both without the flags in `unread` and the words behind these. Logs which."""
    kept: tuple[list[str], list[str]] = ([], [])
    found: dict[str, None] = {}
    for words, own in zip((config_flags, argv), kept, strict=True):
        flag = ""
        for word in words:
            flag = flag_in(word) or flag
            if flag in unread:
                found[flag] = None
            else:
                own.append(word)
    if found:
        log_on_main(f"ignored because this step does not use them: {', '.join(found)}")
    return kept


def _value_in(argv: Sequence[str], flag: str, **keywords: Any) -> str | None:
    """Return the word behind a flag, before the others are known. keywords: as `add_argument` takes them"""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(flag, dest="value", **keywords)
    value: str | None = finder.parse_known_args(list(argv))[0].value
    return value


def _is_resumed(values: Mapping[str, Any], argv: Sequence[str]) -> bool:
    typed = _value_in(argv, "--resume", nargs="?", const="")
    resume = values.get("resume") if typed is None else typed
    return resume is not None and str(resume).lower() not in ("false", "no")


def _without_choices(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The settings of a file without those that the program chose as the run began."""
    chosen = chosen_in(Path(path).read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in chosen}


def _flags_of(
    values: dict[str, Any],
    parser: argparse.ArgumentParser,
    path: str,
    others: Collection[str],
    *,
    suggested: Sequence[str],
    may_be_older: bool,
) -> list[str]:
    """Write YAML values as flags, so that files and flags are checked by the same rules.

    others: flags that are read beside the parser's. suggested: of other programs, for a mistyped name
    may_be_older: the file is of a resumed run, and may have settings that this version lacks; those of its checkpoint
        are compared later
    """
    names = [name for name in _names(parser) if name not in ("config", "help", "h", "local_rank")]
    flags: list[str] = []
    older: list[str] = []
    mistakes = Mistakes()
    for name, value in values.items():
        if name not in names and f"--{name}" not in others:
            owner = owner_sentence("flags", str(name))
            if may_be_older and not owner:
                older.append(str(name))
                continue
            hint = owner or nearest_flags(str(name), [*names, *suggested])
            mistakes.add(f"{path}: unknown setting '{name}'{hint}")
        elif isinstance(value, dict):
            mistakes.add(f"{path}: '{name}' expects one value or a list, got a mapping")
        elif value != []:
            flags += words_of(name, value)
    mistakes.raise_if_any()
    if older:
        log_on_main(f"{path}: ignored because this version has no such settings: {', '.join(older)}")
    return flags


def words_of(name: str, value: Any) -> list[str]:
    """Write a YAML value as a flag's words; none for "name:" without a value, which keeps the default."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    if isinstance(value, bool):
        return [f"--{name}", "true" if value else "false"]
    return [f"--{name}={value}"]


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def _read_as_others(old_flags: Mapping[str, Any]) -> list[str]:
    """Names of other programs that a flag here stands for, to suggest after ours."""
    return [flag.removeprefix("--") for flag, old in old_flags.items() if hasattr(old, "now")]


def _refuse_unknown_flags(unknown: Sequence[str], parser: argparse.ArgumentParser, others: Sequence[str] = ()) -> None:
    mistakes, names = Mistakes(), [name for name in _names(parser) if name != "local_rank"]
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].split("=")[0]
            hint = owner_sentence("flags", name) or nearest_flags(name, [*names, *others], "--")
            mistakes.add(f"unknown flag --{name}{hint}")
    if unknown and not mistakes.sentences:
        mistakes.add(f"the command line has words that belong to no flag: {' '.join(unknown)}")
    mistakes.raise_if_any()


def _instance(group: type, namespace: argparse.Namespace) -> Any:
    members = _members(group)
    if members:
        return group(**{name: _instance(member, namespace) for name, member in members.items()})
    return group(**{field.name: getattr(namespace, field.name) for field in dataclasses.fields(group)})


@functools.cache
def _members(group: type) -> dict[str, type]:
    """The groups in a composite, by field; empty for a group of flags."""
    kinds = typing.get_type_hints(group)
    return kinds if all(dataclasses.is_dataclass(kind) for kind in kinds.values()) else {}


def _parts(group: type) -> list[type]:
    """The groups of flags in `group`."""
    return [part for member in _members(group).values() for part in _parts(member)] or [group]
