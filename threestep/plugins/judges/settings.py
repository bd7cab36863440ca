"""Settings of a service that is asked, from a YAML file whose every key is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.base.storage import parse_yaml

_Settings = TypeVar("_Settings")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "dict": ((dict,), "a mapping"),
    "list": ((list,), "a list"),
}


def read_settings(path: str, where: str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ThreestepError for any other content."""
    try:
        given = parse_yaml(Path(path).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not text"
        raise ThreestepError(f"{where}: cannot read the YAML file ({reason}); pass another path") from problem
    except Exception as problem:  # yaml has many
        raise ThreestepError(f"{where} is not valid YAML: {' '.join(str(problem).split()):.200}") from problem
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ThreestepError(f"{where} expects settings as NAME: VALUE, got {type(given).__name__}")
    return given


def settings_from(given: Mapping[str, Any], where: str, *kinds: type[Any]) -> list[Any]:
    """Return a record of each of the classes, whose fields are all keys that `given` may have. ThreestepError for
    unknown and missing keys, and for values of another type."""
    mistakes = Mistakes()
    known = {field.name: field for kind in kinds for field in fields(kind)}
    unknown = set(given) - set(known)  # one of them may be what seems to be missing
    for name, value in given.items():
        if name not in known:
            hint = "; put the key in a file (key_file) or an environment variable (key_variable)"
            near = hint if name in ("key", "api_key") else nearest_names(name, known)
            mistakes.add(f"{where}: unknown setting '{name}'{near or '; it may have ' + ', '.join(known)}")
        else:
            _check_type(name, value, str(known[name].type), where, mistakes=mistakes)
    for name, field in known.items():
        mistakes.require(
            field.default is not MISSING or field.default_factory is not MISSING or name in given or bool(unknown),
            f"{where} has no setting '{name}'; add it",
        )
    mistakes.raise_if_any()
    return [kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given}) for kind in kinds]


def _check_type(name: str, value: Any, annotation: str, where: str, *, mistakes: Mistakes) -> None:
    word, _, optional = annotation.partition(" | ")
    types, expected = _KINDS[word.partition("[")[0]]
    if value is None and optional:
        return
    is_of_type = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    mistakes.require(is_of_type, f"{where}: {name} expects {expected}, got {value!r:.60}")
