"""Chat messages before a template sees them: one shape for all sources, and plain texts as messages.

Knows nothing of templates, tokens or phases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.utils.run.errors import ThreestepError, nearest_names

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]

# The wrapping of DeepSpeed-Chat's prompts, and the turns inside it as Anthropic's hh-rlhf writes them.
_HUMAN, _ASSISTANT = "Human:", "Assistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")


class BadConversation(ThreestepError):
    """One row that cannot become a conversation to train on; the sentence names the row."""


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, and where they come from.

    `messages`: checked by `checked_messages`. `tools`: JSON objects, or None. `template_kwargs`: what this row
    alone passes to the template. `where`: the row in words, for errors.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def checked_messages(messages: Any, where: str) -> list[Message]:
    """Messages in one shape: dictionaries with `role` and `content` (text, a list of typed parts, or None beside tool
    calls), no other keys whose value is None, tool calls as objects, their arguments too where they are the JSON
    text of an object.

    Raises BadConversation for what is no message and for a role that is not one of `ROLES`.
    """
    messages = _plain(messages)
    if not isinstance(messages, list):
        raise BadConversation(f"{where}: expected a list of messages, got {type(messages).__name__}")
    return [_checked(message, f"{where}, message {number}") for number, message in enumerate(messages, start=1)]


def _checked(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadConversation(f"{where}: expected an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise BadConversation(
            f"{where}: expected a role among {', '.join(ROLES)}, got {role!r}{nearest_names(str(role), ROLES)}; "
            "rename it in the data"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    for key in REASONING_KEYS:
        if not isinstance(kept.get(key, ""), str):
            raise BadConversation(f"{where}: expected {key} to be text, got {type(kept[key]).__name__}")
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], where)
        if not kept["tool_calls"]:
            del kept["tool_calls"]
    # Some templates write tool calls only where there is no content, and tell that by None.
    content = kept.setdefault("content", None if "tool_calls" in kept else "")
    if content is None:
        return kept
    texts = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in texts):
        raise BadConversation(
            f"{where}: expected content that is text or a list of parts such as "
            f'{{"type": "text", "text": ...}}, got {content!r:.60}'
        )
    return kept


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _parsed(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadConversation(f"{where}: expected tool_calls to be a list of objects, got {calls!r:.60}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write arguments with `tojson`: an object that came as JSON text would be quoted twice."""
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _tool_call(call["function"])
    if isinstance(call.get("arguments"), str):
        arguments = _parsed(call["arguments"])
        if isinstance(arguments, dict):
            call["arguments"] = arguments
    return call


def checked_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools as a list of objects, also where they came as JSON text; None for no tools."""
    tools = _plain(_parsed(tools) if isinstance(tools, str) and tools.strip() else tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadConversation(f"{where}: expected tools to be a list of objects or its JSON text, got {tools!r:.60}")
    return tools


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """Lists and dictionaries in place of what Arrow, NumPy and the like give; scalars as Python's own."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def messages_of_text(prompt: str) -> list[Message]:
    """A plain prompt as messages: without DeepSpeed-Chat's "Human: ... Assistant:" around it, one user message.

    Inside that wrapping, turns that begin with "Human:" or "Assistant:" after an empty line are messages of
    their own, as Anthropic's hh-rlhf writes them. Blanks around a text are left out.
    """
    text = prompt.strip()
    if not (text.startswith(_HUMAN) and text.endswith(_ASSISTANT)):
        return [{"role": "user", "content": text}]
    pieces = ["Human", *_TURN.split(text[len(_HUMAN) : -len(_ASSISTANT)])]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": said.strip()} for name, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def response_message(response: str) -> Message:
    """A plain response as the assistant's message; blanks around it (DeepSpeed-Chat's " ...") are left out."""
    return {"role": "assistant", "content": response.strip()}
