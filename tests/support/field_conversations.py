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


def _talk(name: str, topic: str, *contents: Any) -> FieldConversation:
    """A user and an assistant in turns; what is a message already stays as it is."""
    made = [
        each if isinstance(each, dict) and "role" in each else (_user, _answer)[place % 2](each)
        for place, each in enumerate(contents)
    ]
    return FieldConversation(name, topic, made)


def _acted(
    name: str, question: str, call: tuple[str, Any], result: str, answer: str, content: str | None = ""
) -> FieldConversation:
    """A question that one call answers. content: beside the call"""
    messages = [
        _user(question), _answer(content, tool_calls=[_call(*call)]), _result(call[0], result), _answer(answer)
    ]  # fmt: skip
    return FieldConversation(name, "calls", messages, TOOLS)


_TWO_LOAVES = {"items": [{"loaf": "rye", "count": 2}], "address": {"street": "Mill Lane"}}
CONVERSATIONS = (
    _talk("one turn", "text", "Which bird wakes first?", "The redstart, well before dawn."),
    _talk(
        "three turns",
        "text",
        "Name a river.",
        "The Elbe.",
        "How long is it?",
        "About 1,094 kilometres.",
        "And its mouth?",
        "Cuxhaven, on the North Sea.",
    ),
    _talk("code", "text", "Write the area\nof a circle.", _CODE),
    _talk("long line", "text", "Count the stones.", _LONG),
    _talk("scripts", "text", "שלום, 你好, नमस्ते 👋🏽", "مرحبا — naïve café 🧑\u200d🚀 Ελλάδα\u00a0ok ﬁn"),
    _talk("ends with a question", "text", "Is it raining?", "Not yet.", "Should I take a coat?"),
    FieldConversation(
        "system",
        "system",
        [
            {"role": "system", "content": "You keep the lighthouse. Answer briefly."},
            *_talk("", "", "Is the lamp lit?", "Lit since six.", "Any ships?", "Two trawlers.").messages,
        ],
    ),
    FieldConversation(
        "developer",
        "system",
        [{"role": "developer", "content": "Speak like a baker."}, _user("Good morning."), _answer("Warm rolls today.")],
    ),
    _talk("blank edges", "unusual", "  Indent this:\n", "\n    four spaces, then a line end\n\n", "Thanks. ", " Ok"),
    _talk("empty answer", "unusual", "Say nothing.", "", "Now speak.", "Done."),
    _talk("blank answer", "unusual", "Say a blank.", "  \n ", "More.", "One word."),
    _talk(
        "quotes marks",
        "unusual",
        "What do <|im_end|>, <|eot_id|>, </s> and [/INST] mean?",
        "They end a turn: <|im_start|>assistant begins one, <end_of_turn> closes Gemma's, <|end|> Phi's.",
    ),
    _talk("two questions", "unusual", "First part.", _user("Second part."), _answer("Both parts answered.")),
    _talk(
        "assistant first",
        "unusual",
        _answer("Welcome to the harbour office."),
        _user("A berth, please."),
        _answer("Berth nine."),
    ),
    _talk(
        "parts",
        "unusual",
        [{"type": "text", "text": "Read the tide table."}],
        [{"type": "text", "text": "High water at noon."}],
    ),
    FieldConversation("tools unused", "tools", [_user("Just say hello."), _answer("Hello there.")], TOOLS),
    _acted(
        "call of texts",
        "When does the ferry leave?",
        ("ferry_times", {"harbour": 'Kiel "Nord"', "day": "Friday\nnight"}),
        '{"times": ["08:15", "17:40"], "late": null}',
        "At 08:15 and 17:40.",
    ),
    _acted("call of numbers", "Add 12 and -3.5.", ("add_up", {"left": 12, "right": -3.5}), "8.5", "That makes 8.5."),
    _acted(
        "call of truth values",
        "Lamp off, keep the colour.",
        ("set_lamp", '{"lit": false, "colour": null}'),
        "ok",
        "It is off.",
        content=None,
    ),
    _acted("call of nothing", "What time is it?", ("read_clock", {}), "A quarter past nine.", "Quarter past nine."),
    _acted(
        "call of objects",
        "Two rye loaves to Mill Lane.",
        ("place_order", _TWO_LOAVES),
        '{"order": 77}',
        "Order 77 is placed.",
    ),
    _acted(
        "call as JSON text",
        "Ferries from Rostock on Monday?",
        ("ferry_times", '{"harbour": "Rostock", "day": "Monday"}'),
        "none",
        "None that day.",
        content=None,
    ),
    _acted(
        "text and call",
        "Please check the clock.",
        ("read_clock", {}),
        "noon",
        "Noon sharp.",
        content="Let me look at it.",
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
    _talk(
        "reasoning_content",
        "reasoning",
        "Is 91 prime?",
        _answer("No.", reasoning_content="Seven times thirteen gives it."),
        "And 97?",
        _answer("Yes, it is.", reasoning_content="No divisor up to nine works."),
    ),
    _talk("thinking", "reasoning", "Is 119 prime?", _answer("It is not.", thinking="Seventeen divides it.")),
    _talk(
        "think tags", "reasoning", "Is 57 prime?", "<think>\nThree times nineteen.\n</think>\n\nNo, it has a factor."
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
