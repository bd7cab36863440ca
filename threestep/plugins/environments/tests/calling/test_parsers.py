"""Calls in a model's text, read whole or not at all, and against the schemas of tools."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from threestep.plugins.environments.calling.parsers import LONGEST_CALL, PARSERS, Parsed, parser_of, read_message
from threestep.plugins.environments.calling.schemas import argument_problem, schema_of
from threestep.plugins.environments.interface import Call
from training.utils.base.errors import ThreestepError

ADD, NOW = Call("add", {"a": 1, "b": "x y"}), Call("now", {})
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>\n<tool_call>'
    '{"arguments": "{}", "name": "now"}</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "x y"}}; {"name": "now", "parameters": {}}',
    "pythonic": '[add(a=1, b="x y"), now()]',
}
BEGINS = {"hermes": "<tool_call>", "llama": '{"name":', "pythonic": "[add("}
NO_CALLS = {  # text that looks like a call from afar
    "hermes": 'the answer is {"name": "add"}',
    "llama": '{"type": "report", "answer": 4}',
    "pythonic": "[1, 2] and f(x)",
}


@pytest.mark.parametrize("form", PARSERS)
def test_several_calls_are_read_in_their_order(form):
    message = read_message(WRITTEN[form], PARSERS[form])
    assert (message.calls, message.content, message.problems) == ((ADD, NOW), "", ())


@pytest.mark.parametrize("form", PARSERS)
def test_a_call_that_is_cut_anywhere_is_no_call_and_said(form):
    """Every beginning of the last call."""
    whole = WRITTEN[form]
    begin = whole.rindex(BEGINS[form]) + len(BEGINS[form])
    for end in range(begin, len(whole)):
        message = read_message(whole[:end], PARSERS[form])
        assert NOW not in message.calls and len(message.problems) == 1, whole[:end]
        assert message.problems[0].startswith("the tool call could not be read: ")


@pytest.mark.parametrize("form", PARSERS)
def test_other_text_is_content(form):
    message = read_message(f" {NO_CALLS[form]}\n", PARSERS[form])
    assert (message.calls, message.content, message.problems) == ((), NO_CALLS[form], ())


def test_content_has_no_white_space_around_it_without_a_form_either():
    """Models whose prompts end in "Assistant:" begin with a space, which no environment should have to know."""
    message = read_message(" 9\n", Parsed)
    assert (message.text, message.content) == (" 9\n", "9")


@pytest.mark.parametrize("form", PARSERS)
def test_calls_inside_the_reasoning_do_not_count(form):
    thought = read_message(f"<think>\nperhaps {WRITTEN[form]}\n</think>\n\nno", PARSERS[form])
    assert (thought.calls, thought.problems, thought.content) == ((), (), "no")
    assert thought.reasoning == f"perhaps {WRITTEN[form]}"
    opened_by_the_prompt = read_message(f"perhaps</think>{WRITTEN[form]}", PARSERS[form])
    assert opened_by_the_prompt.reasoning == "perhaps" and opened_by_the_prompt.calls == (ADD, NOW)
    assert read_message(f"<think>{WRITTEN[form]}", PARSERS[form]).calls == ()  # it never ended


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'expected an object with "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 'object of arguments in the call of "f"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
        ("hermes", "<tool_call>" + "[" * 50_000 + "</tool_call>", ""),
        ("hermes", "<tool_call>" * LONGEST_CALL, "more than 100,000 characters"),
        ("llama", '<|python_tag|>{"answer": 4}', 'expected an object with "name"'),
        ("pythonic", "[f(1)]", "expected keyword arguments in the call of f"),
        ("pythonic", "[f(a=open('x'))]", "malformed node"),
        ("pythonic", "[f(a=b'x')]", "got bytes"),
        ("pythonic", "[f(a=" + "(" * 5_000, ""),
        ("pythonic", "[f(a=" + "-" * 50_000 + "1)]", ""),
        ("pythonic", "[f(a=1)].pop()", "expected a list of calls"),
        ("pythonic", "[f(x)(a=1)]", "expected the name of a tool"),
        ("pythonic", "<|tool_call_start|>[f(a=1)]", "expected <|tool_call_end|> after the calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(form, text, problem):
    message = read_message(text, PARSERS[form])
    assert message.calls == () and len(message.problems) == 1
    assert problem in message.problems[0] and "\n" not in message.problems[0] and len(message.problems[0]) < 300


def test_calls_beside_text_and_malformed_ones():
    text = 'Let me see.<tool_call>{oops}</tool_call> And: <tool_call>{"name": "now"}</tool_call> Done.'
    message = read_message(text, PARSERS["hermes"])
    assert (message.calls, len(message.problems), message.content) == ((NOW,), 1, "Let me see. And:  Done.")
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert read_message(text, PARSERS["hermes"]).calls == (Call("add", {"a": "</tool_call>"}),)
    text = "Sure.<|tool_call_start|>[now(), add(a=-1.5, b=[true, None, (1, 2)])]<|tool_call_end|>"
    message = read_message(text, PARSERS["pythonic"])
    assert message.calls == (NOW, Call("add", {"a": -1.5, "b": [True, None, [1, 2]]})) and message.content == "Sure."


@pytest.mark.parametrize("form", PARSERS)
def test_no_text_makes_a_parser_raise(form):
    draws = random.Random(7)
    pieces = ["\n", WRITTEN[form], *'<think> </think> { } [ ]( " \x00 \ud800 \\ f(a=1) 🙂 null 1e999'.split(" ")]
    pieces += ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name":', "'"]
    for _ in range(2_000):
        text = "".join(draws.choices(pieces, k=draws.randrange(12)))
        message = read_message(text, PARSERS[form])
        assert message.text == text and len(message.calls) + len(message.problems) <= 24


TEMPLATES = {  # as the public families write or ask for calls
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    "llama": "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    "pythonic": "in the format of [func_name1(params_name1=params_value1, ...), func_name2(params)]",
}


@pytest.mark.parametrize("form", PARSERS)
def test_auto_reads_the_form_from_the_template(form):
    assert parser_of("auto", TEMPLATES[form]) is PARSERS[form] is parser_of(form, None)


@pytest.mark.parametrize(
    ("template", "got"),
    [
        (None, "no signs of any of them"),
        ("<tool_call>\n<function=example>", "no signs of any of them"),
        (TEMPLATES["hermes"] + TEMPLATES["pythonic"], "signs of hermes and pythonic"),
    ],
)
def test_auto_refuses_to_guess(template, got):
    with pytest.raises(
        ThreestepError, match=f"--tool_parser auto expects a chat template .*, but found {got}; name the"
    ):
        parser_of("auto", template)
    with pytest.raises(ThreestepError, match="--tool_parser expects auto, hermes.*got 'herms'; did you mean 'hermes'?"):
        parser_of("herms", template)


def test_a_parser_of_the_users_is_called(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def bare(text):\n    return [{'name': text, 'arguments': {}}]\n"
        "def parted(text):\n    return [], text.upper()\n"
        "def wrong(text):\n    return 1 / 0\n"
    )
    assert read_message("now", parser_of(f"{file}:bare", None)).calls == (NOW,)
    assert read_message("now", parser_of(f"{file}:parted", None)).content == "NOW"
    failed = read_message("now", parser_of(f"{file}:wrong", None))
    assert failed.problems == ("the tool call could not be read: division by zero",) and failed.content == "now"


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
        ({"steps": True}, "argument 'steps': expected integer, got True"),
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
        (untyped, "the tool 'untyped' needs a docstring .*: Argument steps is missing a type hint"),
        (undescribed, "the tool 'undescribed' needs a docstring .* no description for the argument 'steps'"),
        (undocumented, "the tool 'undocumented' needs a docstring .* has no docstring"),
        (of_a_class, "the tool 'of_a_class' may only have arguments of JSON types .* got 'robots: Robot'"),
        (of_any_number, r"the tool 'of_any_number' may only have named arguments, got '\*steps"),
        (Robot(), "expects functions, got Robot; write a function that calls it"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_a_sentence(function, message):
    with pytest.raises(ThreestepError, match=f"--tools:? {message}") as caught:
        schema_of(function, "--tools")
    assert "\n" not in str(caught.value)
