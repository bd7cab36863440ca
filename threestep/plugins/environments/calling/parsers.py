"""Tool calls in a model's text: three forms of the public model families, or a parser of the user's.

A parser never raises for a model's text. A call that was cut or cannot be read is no call: it becomes one sentence for
the model. Calls inside the reasoning do not count.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from threestep.plugins.environments.interface import AssistantMessage, Call
from training.utils.base.errors import ThreestepError, first_line, nearest_names
from training.utils.base.user_files import is_address, load_function
from training.utils.flags.flags import AUTO

LONGEST_CALL = 100_000  # characters of text with a call in it; a longer one is not read
_UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError)  # of json and ast, for text of any kind


class Parsed(NamedTuple):
    """content: the text without calls. problems: one sentence for each call that began and could not be read."""

    content: str
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()


Parser = Callable[[str], Parsed]
_TOO_LONG = Parsed("", problems=(f"the tool calls could not be read: more than {LONGEST_CALL:,} characters",))

THINK_END = "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_PYTHONIC_TAGS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
_BEGINS_JSON_CALL = re.compile(r'\{\s*"(type|name|parameters|arguments)"\s*:')
_BEGINS_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_BLANKS = re.compile(r"\s*")
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


def read_message(text: str, parser: Parser) -> AssistantMessage:
    """Return a turn's text in its parts, without white space around them. A prompt may have opened the reasoning: it
    ends with the last </think>, and one that does not end leaves no content."""
    before, end, behind = text.rpartition(THINK_END)
    if not end and text.lstrip().startswith("<think>"):
        before, behind = text, ""
    reasoning = before.strip().removeprefix("<think>").strip()
    parsed = parser(behind)
    return AssistantMessage(text, parsed.content.strip(), reasoning, parsed.calls, parsed.problems)


def parse_hermes(text: str) -> Parsed:
    """Calls of Hermes and Qwen, any number of them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    if len(text) > LONGEST_CALL and _OPEN in text:
        return _TOO_LONG
    calls: list[Call] = []
    problems, content, place = list[str](), list[str](), 0
    while (begin := text.find(_OPEN, place)) >= 0:
        content.append(text[place:begin])
        begin += len(_OPEN)
        try:
            value, end = _json_at(text, begin)
            if not text.startswith(_CLOSE, _behind_blanks(text, end)):
                raise ValueError(f"expected {_CLOSE} after the JSON of a call")
            calls.append(_call_of(value))
        except _UNREADABLE as problem:
            problems.append(_sentence(problem))
            end = begin
        closed = text.find(_CLOSE, end)
        place = len(text) if closed < 0 else closed + len(_CLOSE)
    return Parsed("".join([*content, text[place:]]).strip(), tuple(calls), tuple(problems))


def parse_llama(text: str) -> Parsed:
    """Calls of Llama 3: the message begins with {"name": ..., "parameters": {...}}; several are parted by ";" or white
    space. JSON without a name is content."""
    tagged = text.lstrip().startswith(_PYTHON_TAG)
    rest = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls: list[Call] = []
    if len(rest) > LONGEST_CALL and (tagged or _BEGINS_JSON_CALL.match(rest)):
        return _TOO_LONG
    while rest and (tagged or _BEGINS_JSON_CALL.match(rest)):
        try:
            value, end = _json_at(rest, 0)
            if not tagged and isinstance(value, dict) and "name" not in value:
                break
            calls.append(_call_of(value))
        except _UNREADABLE as problem:
            return Parsed("", tuple(calls), (_sentence(problem),))
        rest = rest[end:].lstrip(" \t\r\n;")
    return Parsed(rest, tuple(calls))


def parse_pythonic(text: str) -> Parsed:
    """Calls as a Python list, of Llama 3.2, Llama 4 and LFM2: [f(a=1, b="x"), g()]. Arguments are literals, by name."""
    content, written = "", text.strip()
    for begin_tag, end_tag in _PYTHONIC_TAGS:
        before, has_tag, behind = text.partition(begin_tag)
        if has_tag:
            written, end, after = behind.partition(end_tag)
            if not end:
                return Parsed(before.strip(), problems=(_sentence(ValueError(f"expected {end_tag} after the calls")),))
            content, written = (before + after).strip(), written.strip()
            break
    else:
        if not _BEGINS_PYTHONIC.match(written):
            return Parsed(written)
    if len(written) > LONGEST_CALL:
        return _TOO_LONG
    try:
        tree = ast.parse(written, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("expected a list of calls, [name(argument=value), ...]")
        return Parsed(content, tuple(_call_of_node(node) for node in tree.elts))
    except _UNREADABLE as problem:
        return Parsed(content, problems=(_sentence(problem),))


PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "llama": parse_llama, "pythonic": parse_pythonic}

# Signs in a chat template of each form of calls, and signs that it is another form.
_SIGNS: dict[str, tuple[re.Pattern[str], re.Pattern[str] | None]] = {
    "hermes": (re.compile(re.escape(_OPEN)), re.compile(r"<function=|<arg_key>")),
    "llama": (re.compile(r'"name\\?": .{0,80}"parameters\\?": ', re.DOTALL), re.compile(rf"{_OPEN}|\[TOOL_CALLS\]")),
    "pythonic": (re.compile(r"\[func_name1\(|<\|tool_list_start\|>|<\|tool_call_start\|>|<\|python_start\|>"), None),
}


def parser_of(name: str, template: str | None) -> Parser:
    """Return the parser of --tool_parser. template: the text of the chat template, which 'auto' reads.

    Raises ThreestepError for an unknown name, and where the template is of no form or of several.
    """
    if is_address(name):
        return _parser_of_user(name)
    if name != AUTO and name not in PARSERS:
        raise ThreestepError(
            f"--tool_parser expects {AUTO}, {', '.join(PARSERS)} or FILE.py:NAME, got '{name}'"
            f"{nearest_names(name, PARSERS)}"
        )
    if name != AUTO:
        return PARSERS[name]
    forms = [form for form, (sign, other) in _SIGNS.items() if _shows(template or "", sign, other)]
    if len(forms) != 1:
        got = f"signs of {' and '.join(forms)}" if forms else "no signs of any of them"
        raise ThreestepError(
            f"--tool_parser {AUTO} expects a chat template that renders calls in the format of {', '.join(PARSERS)}, "
            f"but found {got}; name the parser, or pass your own as FILE.py:NAME"
        )
    return PARSERS[forms[0]]


def _shows(template: str, sign: re.Pattern[str], other: re.Pattern[str] | None) -> bool:
    return sign.search(template) is not None and (other is None or other.search(template) is None)


def _parser_of_user(address: str) -> Parser:
    """A parser from a function of text to a list of {"name", "arguments"}, or to such a list and the text without
    calls; its exception is the problem of the call."""
    function = load_function(address, "--tool_parser")

    def parse(text: str) -> Parsed:
        try:
            parsed = function(text)
            values, content = parsed if isinstance(parsed, tuple) else (parsed, text)
            return Parsed(str(content), tuple(_call_of(value) for value in values))
        except Exception as problem:  # noqa: BLE001 - whatever a user's function raises for a model's text
            return Parsed(text, problems=(_sentence(problem),))

    return parse


def _sentence(problem: BaseException) -> str:
    return f"the tool call could not be read: {first_line(problem)}"


def _json_at(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins at or behind `begin`, after white space, and where it ends."""
    return json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text, _behind_blanks(text, begin))


def _behind_blanks(text: str, place: int) -> int:
    blanks = _BLANKS.match(text, place)
    return place if blanks is None else blanks.end()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _call_of(value: Any) -> Call:
    """The call in a JSON value; ValueError for any other value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('expected an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the JSON text of an object
        arguments, _ = _json_at(arguments, 0)
    if not isinstance(arguments, dict):
        raise ValueError(f'expected an object of arguments in the call of "{value["name"]}"')
    return Call(value["name"], {name: _plain_value(argument) for name, argument in arguments.items()})


def _call_of_node(node: ast.expr) -> Call:
    """The call that a node of Python's syntax tree is; ValueError for any other node."""
    if not isinstance(node, ast.Call):
        raise ValueError("expected a list of calls, [name(argument=value), ...]")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("expected the name of a tool before the arguments")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"expected keyword arguments in the call of {name}")
    return Call(
        name,
        {
            str(keyword.arg): _plain_value(ast.literal_eval(_JsonConstants().visit(keyword.value)))
            for keyword in node.keywords
        },
    )


class _JsonConstants(ast.NodeTransformer):
    """true, false and null, which models write for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def _plain_value(value: Any) -> Any:
    """A value that JSON can hold, tuples as lists; ValueError for any other."""
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain_value(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"expected text, numbers, lists and objects as arguments, got {type(value).__name__}")
