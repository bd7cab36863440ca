"""Comparison of functions by their code."""

from __future__ import annotations

from types import CodeType
from typing import Any


def is_written_as(function: Any, usual: Any) -> bool:
    """Return whether two functions have the same operations, names and constants, whatever they call their variables;
    False for what is not written in Python."""
    one, other = getattr(function, "__code__", None), getattr(usual, "__code__", None)
    return one is not None and other is not None and _written(one) == _written(other)


def _written(code: CodeType) -> tuple[Any, ...]:
    constants = [each for each in code.co_consts if each is not None and not isinstance(each, str)]  # no docstrings
    return code.co_code, code.co_names, tuple(map(repr, constants))
