"""Thirty conversations that chat templates are tried on: text, system prompts, tools, calls, reasoning, odd content.

Each is a row in OpenAI's form, `messages` and perhaps `tools`, and has the topic under which the table of templates
counts it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TOPICS = ("text", "system", "unusual", "tools", "calls", "parallel", "reasoning")


@dataclass(frozen=True)
class FieldConversation:
    """A row's name, topic, messages and tools."""

    name: str
    topic: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The row as a file of JSON lines holds it. Tools are JSON text: their schemas differ from row to row."""
        tools = {} if self.tools is None else {"tools": json.dumps(self.tools)}
        return {"messages": self.messages, **tools}


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _answer(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(name: str, content: str, number: int = 1) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": content}


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TEXT = {"type": "string", "description": "Plain words."}
FERRY = _tool("ferry_times", "Departures from a harbour.", harbour=_TEXT, day=_TEXT)
ADD = _tool(
    "add_up",
    "Adds two numbers.",
    left={"type": "number", "description": "The first."},
    right={"type": "number", "description": "The second."},
)
LAMP = _tool(
    "set_lamp",
    "Switches a lamp.",
    lit={"type": "boolean", "description": "True for on."},
    colour={"type": ["string", "null"], "description": "None keeps it."},
)
CLOCK = _tool("read_clock", "The time of day.")
ORDER = _tool(
    "place_order",
    "Orders from the bakery.",
    items={"type": "array", "items": {"type": "object"}, "description": "What to bake."},
    address={"type": "object", "properties": {"street": _TEXT}, "description": "Where to."},
)
TOOLS = [FERRY, ADD, LAMP, CLOCK, ORDER]

_CODE = '```python\ndef area(r):\n\treturn 3.14 * r ** 2  # "rough"\n```\n\nCall `area(2)`.'
_LONG = " ".join(f"stone {number} of the wall" for number in range(400))

CONVERSATIONS = (
    FieldConversation(
        "one turn", "text", [_user("Which bird wakes first?"), _answer("The redstart, well before dawn.")]
    ),
    FieldConversation(
        "three turns",
        "text",
        [
            _user("Name a river."),
            _answer("The Elbe."),
            _user("How long is it?"),
            _answer("About 1,094 kilometres."),
            _user("And its mouth?"),
            _answer("Cuxhaven, on the North Sea."),
        ],
    ),
    FieldConversation("code", "text", [_user("Write the area\nof a circle."), _answer(_CODE)]),
    FieldConversation("long line", "text", [_user("Count the stones."), _answer(_LONG)]),
    FieldConversation(
        "scripts", "text", [_user("שלום, 你好, नमस्ते 👋🏽"), _answer("مرحبا — naïve café 🧑‍🚀 Ελλάδα\u00a0ok ﬁn")]
    ),
    FieldConversation(
        "ends with a question", "text", [_user("Is it raining?"), _answer("Not yet."), _user("Should I take a coat?")]
    ),
    FieldConversation(
        "system",
        "system",
        [
            {"role": "system", "content": "You keep the lighthouse. Answer briefly."},
            _user("Is the lamp lit?"),
            _answer("Lit since six."),
            _user("Any ships?"),
            _answer("Two trawlers."),
        ],
    ),
    FieldConversation(
        "developer",
        "system",
        [{"role": "developer", "content": "Speak like a baker."}, _user("Good morning."), _answer("Warm rolls today.")],
    ),
    FieldConversation(
        "blank edges",
        "unusual",
        [
            _user("  Indent this:\n"),
            _answer("\n    four spaces, then a line end\n\n"),
            _user("Thanks. "),
            _answer(" Ok"),
        ],
    ),
    FieldConversation(
        "empty answer", "unusual", [_user("Say nothing."), _answer(""), _user("Now speak."), _answer("Done.")]
    ),
    FieldConversation(
        "blank answer", "unusual", [_user("Say a blank."), _answer("  \n "), _user("More."), _answer("One word.")]
    ),
    FieldConversation(
        "quotes marks",
        "unusual",
        [
            _user("What do <|im_end|>, <|eot_id|>, </s> and [/INST] mean?"),
            _answer("They end a turn: <|im_start|>assistant begins one, <end_of_turn> closes Gemma's, <|end|> Phi's."),
        ],
    ),
    FieldConversation(
        "two questions", "unusual", [_user("First part."), _user("Second part."), _answer("Both parts answered.")]
    ),
    FieldConversation(
        "assistant first",
        "unusual",
        [_answer("Welcome to the harbour office."), _user("A berth, please."), _answer("Berth nine.")],
    ),
    FieldConversation(
        "parts",
        "unusual",
        [
            _user([{"type": "text", "text": "Read the tide table."}]),
            _answer([{"type": "text", "text": "High water at noon."}]),
        ],
    ),
    FieldConversation("tools unused", "tools", [_user("Just say hello."), _answer("Hello there.")], TOOLS),
    FieldConversation(
        "call of texts",
        "calls",
        [
            _user("When does the ferry leave?"),
            _answer("", tool_calls=[_call("ferry_times", {"harbour": 'Kiel "Nord"', "day": "Friday\nnight"})]),
            _result("ferry_times", '{"times": ["08:15", "17:40"], "late": null}'),
            _answer("At 08:15 and 17:40."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "call of numbers",
        "calls",
        [
            _user("Add 12 and -3.5."),
            _answer("", tool_calls=[_call("add_up", {"left": 12, "right": -3.5})]),
            _result("add_up", "8.5"),
            _answer("That makes 8.5."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "call of truth values",
        "calls",
        [
            _user("Lamp off, keep the colour."),
            _answer(None, tool_calls=[_call("set_lamp", '{"lit": false, "colour": null}')]),
            _result("set_lamp", "ok"),
            _answer("It is off."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "call of nothing",
        "calls",
        [
            _user("What time is it?"),
            _answer("", tool_calls=[_call("read_clock", {})]),
            _result("read_clock", "A quarter past nine."),
            _answer("Quarter past nine."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "call of objects",
        "calls",
        [
            _user("Two rye loaves to Mill Lane."),
            _answer(
                "",
                tool_calls=[
                    _call("place_order", {"items": [{"loaf": "rye", "count": 2}], "address": {"street": "Mill Lane"}})
                ],
            ),
            _result("place_order", '{"order": 77}'),
            _answer("Order 77 is placed."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "call as JSON text",
        "calls",
        [
            _user("Ferries from Rostock on Monday?"),
            _answer(None, tool_calls=[_call("ferry_times", '{"harbour": "Rostock", "day": "Monday"}')]),
            _result("ferry_times", "none"),
            _answer("None that day."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "text and call",
        "calls",
        [
            _user("Please check the clock."),
            _answer("Let me look at it.", tool_calls=[_call("read_clock", {})]),
            _result("read_clock", "noon"),
            _answer("Noon sharp."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "ends in a call",
        "calls",
        [
            _user("Switch the lamp on in green."),
            _answer("", tool_calls=[_call("set_lamp", {"lit": True, "colour": "green"})]),
        ],
        TOOLS,
    ),
    FieldConversation(
        "two calls",
        "parallel",
        [
            _user("Add 1 and 2, and read the clock."),
            _answer("", tool_calls=[_call("add_up", {"left": 1, "right": 2}), _call("read_clock", {}, 2)]),
            _result("add_up", "3"),
            _result("read_clock", "ten", 2),
            _answer("Three, and it is ten."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "calls in a row",
        "parallel",
        [
            _user("Read the clock, then switch the lamp on."),
            _answer("", tool_calls=[_call("read_clock", {})]),
            _result("read_clock", "dusk"),
            _answer("", tool_calls=[_call("set_lamp", {"lit": True, "colour": "amber"}, 2)]),
            _result("set_lamp", "ok", 2),
            _answer("At dusk the lamp went on."),
            _user("Well done."),
            _answer("Gladly."),
        ],
        TOOLS,
    ),
    FieldConversation(
        "reasoning_content",
        "reasoning",
        [
            _user("Is 91 prime?"),
            _answer("No.", reasoning_content="Seven times thirteen gives it."),
            _user("And 97?"),
            _answer("Yes, it is.", reasoning_content="No divisor up to nine works."),
        ],
    ),
    FieldConversation(
        "thinking", "reasoning", [_user("Is 119 prime?"), _answer("It is not.", thinking="Seventeen divides it.")]
    ),
    FieldConversation(
        "think tags",
        "reasoning",
        [_user("Is 57 prime?"), _answer("<think>\nThree times nineteen.\n</think>\n\nNo, it has a factor.")],
    ),
    FieldConversation(
        "reasoning and call",
        "reasoning",
        [
            _user("How late is it?"),
            _answer("", reasoning_content="The clock knows.", tool_calls=[_call("read_clock", {})]),
            _result("read_clock", "midnight"),
            _answer("Midnight.", reasoning_content="The tool said so."),
        ],
        TOOLS,
    ),
)
