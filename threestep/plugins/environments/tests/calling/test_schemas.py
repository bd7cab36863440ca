"""Schemas of tools: what a model reads of a function, and calls against them."""

from __future__ import annotations

from typing import Literal

import pytest

from threestep.plugins.environments.calling.schemas import argument_problem, schema_of
from training.utils.base.errors import ThreestepError


def move(steps: int, speed: float = 1.0, way: Literal["up", "down"] = "up", note: str | None = None) -> str:
    """Move the robot.

    Args:
        steps: How many.
        speed: How fast.
        way: Which way.
        note: What to say.
    """
    return f"{steps} {speed} {way} {note}"


def test_a_schema_has_names_types_choices_and_what_is_required():
    schema = schema_of(move, "--tools")
    function = schema["function"]
    assert (schema["type"], function["name"], function["description"]) == ("function", "move", "Move the robot.")
    properties = function["parameters"]["properties"]
    assert {name: own.get("type") for name, own in properties.items()} == {
        "steps": "integer", "speed": "number", "way": "string", "note": "string",
    }  # fmt: skip
    assert properties["way"]["enum"] == ["up", "down"] and properties["steps"]["description"] == "How many."
    assert function["parameters"]["required"] == ["steps"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"steps": 3, "speed": 2, "way": "down", "note": None}, None),
        ({}, "argument 'steps' is missing"),
        ({"steps": 1, "stepz": 2}, "there is no argument 'stepz'; expected steps, speed, way, note; did you mean"),
        ({"steps": "3"}, "argument 'steps': expected integer, got '3'"),
        ({"steps": True}, "argument 'steps': expected integer, got True"),
        ({"steps": None}, "argument 'steps': expected integer, got None"),
        ({"steps": 1, "way": "left"}, "argument 'way': expected one of 'up', 'down', got 'left'"),
        ({"steps": 1, "speed": [2]}, r"argument 'speed': expected number, got [2]"),
    ],
)
def test_arguments_that_do_not_fit_are_said(arguments, problem):
    found = argument_problem(schema_of(move, "--tools"), arguments)
    assert found == problem or (problem and found and found.startswith(problem)), found


class Robot:
    """Of no type that JSON has."""

    def __call__(self, steps: int) -> str:
        """Move."""
        return ""


def untyped(steps):
    """Move.

    Args:
        steps: How many.
    """


def undescribed(steps: int) -> None:
    """Move."""


def undocumented(steps: int) -> None:
    return None


def of_a_class(robots: list[Robot]) -> None:
    """Move.

    Args:
        robots: Which.
    """


def of_any_number(*steps: int) -> None:
    """Move.

    Args:
        steps: How many.
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "the tool 'untyped' expects a docstring .* got: Argument steps is missing a type hint"),
        (undescribed, "the tool 'undescribed' expects a docstring .* no description for the argument 'steps'"),
        (undocumented, "the tool 'undocumented' expects a docstring .* has no docstring"),
        (of_a_class, "the tool 'of_a_class' expects arguments of JSON's types .* got 'robots: Robot'"),
        (of_any_number, r"the tool 'of_any_number' expects arguments by name, got '\*steps"),
        (Robot(), "expects functions, got Robot; write a function that calls it"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_a_sentence(function, message):
    with pytest.raises(ThreestepError, match=f"--tools:? {message}") as caught:
        schema_of(function, "--tools")
    assert "\n" not in str(caught.value)
