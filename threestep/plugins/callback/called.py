"""The user's function that is called with each step's figures (--callback), on the main rank."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user, load_named
from training.utils.contracts.run import RunCourse

CALLBACK_FLAG = "--callback"
STOP = "stop"
_NAMED_HERE = ("step", "seconds")
_OF_TRAINERS = ("on_step_end", "on_log", "on_train_begin")  # methods of transformers' TrainerCallback


def open_course(settings: Mapping[str, Any]) -> RunCourse | None:
    """Return what calls the function; None where no flag names one."""
    return Called(load_callback(settings["callback"])) if settings["callback"] else None


def load_callback(given: str) -> Callable[..., Any]:
    """Return the function of --callback; ThreestepError if it cannot be called as one."""
    function = load_named(given, CALLBACK_FLAG)
    check_callback(function)
    return function


def check_callback(function: Any) -> None:
    """ThreestepError unless `function` can be called with (step, figures)."""
    kind = f"the class {function.__name__}" if isinstance(function, type) else _described(function)
    problem = None
    if any(hasattr(function, method) for method in _OF_TRAINERS):
        problem = f"{kind}, a callback of transformers' Trainer"
    elif isinstance(function, type) or not callable(function):
        problem = kind
    else:
        try:
            inspect.signature(function).bind(0, {})
        except TypeError as other:
            problem = f"{kind}, which has a different signature ({other})"
        except ValueError:  # a built-in function without a signature
            pass
    if problem is not None:
        raise ThreestepError(
            f"{CALLBACK_FLAG} expects a function (step, figures), got {problem}; write `def follow(step, figures): "
            f'...`, which is called with each step\'s metrics and returns "{STOP}" to end training'
        )


def _described(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if callable(function) and name else f"an object of {type(function).__name__}"


class Called(RunCourse):
    """Calls `function(step, figures)`. All ranks end with its mistake, or once it has returned "stop"."""

    judges = True

    def __init__(self, function: Callable[[int, dict[str, float]], Any]) -> None:
        self._function = function
        self._stops = False
        self._problem: str | None = None

    def resumed(self, state: Mapping[str, Any]) -> None:
        # Version 0.1 wrote it into `early_end`.
        self._stops = bool(state.get("called") or (state.get("early_end") or {}).get("called"))

    def figures(self, step: int, figures: Mapping[str, float]) -> Mapping[str, float]:
        if self._problem is not None:
            return {}
        try:
            return self._read(call_user(self._function, step, dict(figures)), figures)
        except ThreestepError as mistake:
            self._problem = f"{CALLBACK_FLAG}: {mistake}"
            return {}

    def end_reason(self) -> str | None:
        if self._problem is not None:
            raise ThreestepError(self._problem)
        return f'the callback returned "{STOP}"' if self._stops else None

    def state(self, step: int) -> dict[str, Any]:
        return {"called": self._stops}

    def _read(self, answer: Any, figures: Mapping[str, float]) -> dict[str, float]:
        if answer is None:
            return {}
        if isinstance(answer, str) and answer == STOP:
            self._stops = True
            return {}
        if not isinstance(answer, Mapping):
            raise ThreestepError(
                f'the function must return None, "{STOP}" or a dict of metrics, got {answer!r:.60}; return None instead'
            )
        for name, value in answer.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
                raise ThreestepError(f"returned metrics must map names to numbers, got {name!r}: {value!r:.60}")
            if name in figures or name in _NAMED_HERE:
                raise ThreestepError(f"the step already has a metric '{name}'; return yours under another name")
        return {name: float(value) if math.isfinite(value) else math.nan for name, value in answer.items()}
