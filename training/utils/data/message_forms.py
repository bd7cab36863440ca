"""Chat messages in the forms that files hold (OpenAI's, ShareGPT's) as one form, and that form as plain text.

The one form is OpenAI's: {"role": "system" | "user" | "assistant" | "tool", "content": text or a list of typed
parts, ...}. Knows nothing of files, tokens or chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from training.utils.data.readers import kind_of
from training.utils.run.errors import ThreestepError

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant", "tool": "Tool"}


def read_messages(value: Any, where: str) -> list[Message] | None:
    """A conversation: a list of messages in either form, one message alone, or JSON text of either; None for null.

    Raises ThreestepError, which begins with `where`, for anything else.
    """
    value = from_json(value, where, "a list of messages")
    if value is None:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ThreestepError(f"{where}: expected a list of messages, got {kind_of(value)}")
    return [_read_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ThreestepError(f"{where}: expected an object, got {kind_of(message)}")
    if "role" in message:
        read = dict(message)
    elif "from" in message and "value" in message:
        read = _of_sharegpt(message, where)
    else:
        raise ThreestepError(
            f"{where}: expected 'role' and 'content', or ShareGPT's 'from' and 'value', got "
            + (", ".join(f"'{key}'" for key in message) or "an empty object")
        )
    if not isinstance(read["role"], str):
        raise ThreestepError(f"{where}: 'role': expected text, got {kind_of(read['role'])}")
    if read.get("content") is None:
        read["content"] = ""
    if not isinstance(read["content"], (str, list)):
        raise ThreestepError(f"{where}: 'content': expected text, got {kind_of(read['content'])}")
    if read["role"] == "function":  # OpenAI's older name
        read["role"] = "tool"
    calls = from_json(read.pop("tool_calls", None), where, "JSON with the name and arguments of a call")
    if calls is None and read.get("function_call"):
        calls = read.pop("function_call")
    if calls:
        read["tool_calls"] = _read_calls(calls, where)
    return read


def _of_sharegpt(message: Message, where: str) -> Message:
    speaker, said = message["from"], message["value"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ThreestepError(f"{where}: 'from': expected one of {', '.join(SHAREGPT_ROLES)}, got {speaker!r}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SHAREGPT_ROLES[speaker], "content": said, **rest}
    return {"role": "assistant", "content": "", "tool_calls": said, **rest}


def _read_calls(calls: Any, where: str) -> list[Message]:
    """Tool calls as {"type": "function", "function": {"name", "arguments": object}, ...}."""
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = (call.get("function") or call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise ThreestepError(f"{where}: a tool call: expected an object with 'name' and 'arguments', got {call!r}")
        outer = call if "function" in call else {}
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        read.append({"type": "function", **outer, "function": function})
    return read


def _arguments(value: Any) -> Any:
    """Arguments as an object; text that is no JSON object (what a model wrote wrongly) stays as it is."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return value
    return parsed if isinstance(parsed, dict) else value


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools as chat templates take them, from a list of them, from JSON text, or from functions alone; None where
    there are none."""
    value = from_json(value, where, "a list of tools")
    if not value:
        return None
    tools = value if isinstance(value, list) else [value]
    read = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise ThreestepError(f"{where}: tools: expected a JSON list of objects, got {kind_of(tool)}")
        is_bare = "name" in tool and "function" not in tool
        read.append({"type": "function", "function": tool} if is_bare else tool)
    return read


def from_json(value: Any, where: str, expected: str) -> Any:
    """What JSON text holds; other text and other values as they are."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ThreestepError(
            f"{where}: expected {expected}, got text that is not JSON ({error.msg}): {value[:60]!r}"
        ) from error


# As text, for models and tokenizers without a chat template.


def prompt_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, where: str) -> str:
    """DeepSpeed-Chat's text of the messages that a response answers.

    [user "Hi"], [assistant "Yes?"], [user "Sing."] become "Human: Hi Assistant: Yes? Human: Sing. Assistant:";
    a system message begins with "System:", a tool's with "Tool:", tools stand in front as JSON behind "Tools:".
    """
    turns = [f"Tools: {json.dumps(tools, ensure_ascii=False)}"] if tools else []
    turns += [_turn(message, where) for message in messages]
    return " ".join([*turns, "Assistant:"])


def response_text(messages: Sequence[Message], where: str) -> str:
    """The text that follows `prompt_text`: " ..." of the first message, which is the assistant's, and the turns
    after it, where there are any."""
    return " ".join(["", _content(messages[0], where), *(_turn(message, where) for message in messages[1:])])


def _turn(message: Message, where: str) -> str:
    speaker = SPEAKERS.get(message["role"])
    if speaker is None:
        raise ThreestepError(
            f"{where}: a message's role: expected one of {', '.join(SPEAKERS)}, got {message['role']!r}"
        )
    return f"{speaker}: {_content(message, where)}"


def _content(message: Message, where: str) -> str:
    parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
    said = ""
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise ThreestepError(f"{where}: a message's content: expected text, got {part!r}"[:200])
        said += text
    thought = message.get("reasoning_content")
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n".join(filter(None, [said, *calls]))
