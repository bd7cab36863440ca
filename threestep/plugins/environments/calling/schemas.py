"""The JSON schema of a tool, from the signature and docstring of a typed Python function, and arguments against it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from training.utils.base.errors import ThreestepError, first_line, nearest_names

# transformers writes any other class as an object, and the function would get a dictionary in its place.
_PLAIN_TYPES = (int, float, str, bool, list, tuple, dict, type(None), Any)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def schema_of(function: Callable[..., Any], flag: str) -> dict[str, Any]:
    """Return {"type": "function", "function": {"name", "description", "parameters", ...}} as chat templates take it.

    The description is the docstring's beginning; each parameter needs a type and a line under "Args:", as in Google's
    docstrings. By transformers' `get_json_schema`. Raises ThreestepError, which names the function, where that fails,
    and for types that JSON does not have.
    """
    from transformers.utils import chat_template_utils as schemas

    name = getattr(function, "__name__", None)
    if name is None:
        raise ThreestepError(f"{flag} expects functions, got {type(function).__name__}; write a function that calls it")
    refusals = (schemas.TypeHintParsingException, schemas.DocstringParsingException, NameError, TypeError, ValueError)
    try:
        schema: dict[str, Any] = schemas.get_json_schema(function)
        hints = get_type_hints(function)
    except refusals as problem:
        raise ThreestepError(
            f"{flag}: the tool '{name}' needs a docstring with a line for each argument under 'Args:', and a type "
            f"for each argument: {first_line(problem)}"
        ) from problem
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ThreestepError(f"{flag}: the tool '{name}' may only have named arguments, got '{parameter}'")
        odd = _odd_type(hints.get(parameter.name, Any))
        if odd is not None:
            raise ThreestepError(
                f"{flag}: the tool '{name}' may only have arguments of JSON types (str, int, float, bool, list, "
                f"dict, Literal), got '{parameter.name}: {odd}'"
            )
    return schema


def _odd_type(hint: Any) -> str | None:
    """The first type inside of a type hint that JSON does not have."""
    if get_origin(hint) is Literal:
        return None
    parts = [part for part in get_args(hint) if part is not Ellipsis]
    if not parts:
        return None if hint in _PLAIN_TYPES else getattr(hint, "__name__", str(hint))
    return next((odd for odd in map(_odd_type, parts) if odd is not None), None)


def argument_problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the mistake in the arguments of a call, in words for the model; None if they fit.

    Checks names, the type of each argument and its choices, not the content of lists and objects.
    """
    parameters = schema["function"]["parameters"]
    known, needed = parameters.get("properties", {}), parameters.get("required", ())
    for name, value in arguments.items():
        if name not in known:
            near = nearest_names(name, known) if known else ""
            return f"there is no argument '{name}'; expected {', '.join(known) or 'none'}{near}"
        problem = _value_problem(known[name], value)
        if problem is not None:
            return f"argument '{name}': {problem}"
    missing = [name for name in needed if name not in arguments]
    return f"argument '{missing[0]}' is missing" if missing else None


def _value_problem(schema: Mapping[str, Any], value: Any) -> str | None:
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else list(names)
    if value is None and schema.get("nullable"):
        return None
    fits = any(_has_type(value, name) for name in names)
    if names and not fits:
        return f"expected {' or '.join(names)}, got {value!r:.80}"
    choices = schema.get("enum")
    if choices is not None and value not in choices:
        return f"expected one of {', '.join(map(repr, choices))}, got {value!r:.80}"
    return None


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(name, (object,)))
