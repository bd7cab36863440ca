"""Chat messages: read from the forms that files hold, checked before a chat template sees them, and as plain text.

Messages are in OpenAI's form: {"role": "system" | "user" | "assistant" | "tool", "content": text or a list of typed
parts, ...}. Knows nothing of files, templates, tokens or phases.

A weight in a message says whether phase 1 puts loss on it. Frameworks spell it differently: `weight` (OpenAI, Mistral),
`loss_mask` (verl), `train` and `training` (Axolotl), `loss` (ms-swift, XTuner), `loss_weight` (LLaMA-Factory),
`step_loss_mask` (Slime). All mean the same here: 0 or false takes the loss off a message of the assistant, 1 or true
and no weight at all leave it on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.storage import parse_json
from training.utils.data.files.columns import kind_of
from training.utils.data.files.content import python_hint
from training.utils.data.formats.media import IMAGE_COLUMNS, ONLY_TEXT, BadConversation, is_empty, joined_text

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SAYS = {"content", "tool_calls", "function_call", "refusal", "audio", *REASONING_KEYS}  # a message has one of them
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

_TOOLS = "a list of tools"
_IN_TOOLS = ("function", "parameters")  # which may be JSON text

# The wrapping of DeepSpeed-Chat's prompts, and the turns inside it as Anthropic's hh-rlhf writes them.
_HUMAN, _ASSISTANT = "Human:", "Assistant:"
FRAME = "", " Assistant:"  # of most prompts, around "Human: QUESTION"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_AS_GIVEN = object()
_BEFORE_SPEAKER = re.compile(r"(\n\n| )\Z")


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, and where they come from.

    messages: checked by `checked_messages`.
    where: names the row in errors.
    tools: JSON objects, or None.
    template_kwargs: variables of the template for this row only.
    untrained: indices of messages that carry no loss by their weight (see `weights`).
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()


# From the forms that files hold.


def read_messages(value: Any, where: str) -> list[Message] | None:
    """A conversation: a list of messages in OpenAI's or ShareGPT's form, a single message, or JSON text of either;
    None for null.

    Raises ThreestepError, which begins with `where`, for anything else.
    """
    value = from_json(value, where, "a list of messages")
    if value is None:
        return None
    check_json(value, where)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise ThreestepError(f"{where}: expected a list of messages, got {kind_of(value)}")
    return [_read_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ThreestepError(f"{where}: expected an object, got {kind_of(message)}")
    if "role" in message and not _SAYS.isdisjoint(message):
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
    read["content"] = joined_text(read, where, images=True)
    if not isinstance(read["content"], (str, list)) and read["content"] is not None:
        raise ThreestepError(f"{where}: 'content': expected text, got {kind_of(read['content'])}")
    read["role"] = "tool" if read["role"] == "function" else read["role"]  # OpenAI's older name
    calls = from_json(read.pop("tool_calls", None), where, "JSON with the name and arguments of a call")
    if calls is None and read.get("function_call"):
        calls = read.pop("function_call")
    if calls:
        read["tool_calls"] = [_read_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    elif read["content"] is None:
        read["content"] = ""
    return read


def _of_sharegpt(message: Message, where: str) -> Message:
    speaker, text = message["from"], message["value"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ThreestepError(f"{where}: 'from': expected one of {', '.join(SHAREGPT_ROLES)}, got {speaker!r}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {"role": SHAREGPT_ROLES[speaker], "content": text, **rest}
    return {"role": "assistant", "content": "", "tool_calls": text, **rest}


def _read_call(call: Any, where: str) -> Message:
    """A tool call as {"type": "function", "function": {"name", "arguments"}, ...}."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ThreestepError(f"{where}: a tool call: expected an object with 'name' and 'arguments', got {call!r}")
    function = {**function, "arguments": _given_arguments(function.get("arguments"))}
    kept = call if "function" in call else {}
    return {**({} if "type" in kept else {"type": "function"}), **kept, "function": function}


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools as chat templates take them: from a list of tools or of their JSON texts, JSON text of a list, or bare
    functions; None for no tools. A tool's function and its parameters may be JSON text, too."""
    value = from_json(value, where, _TOOLS)
    if not value:
        return None
    read = []
    for tool in value if isinstance(value, list) else [value]:
        tool = _read_tool(tool, where)
        is_bare = "name" in tool and "function" not in tool
        read.append({"type": "function", "function": tool} if is_bare else tool)
    check_json(read, f"{where}: tools")
    return read


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    tool = _parsed_text(tool)
    if not isinstance(tool, dict):
        got = f"{kind_of(tool)}: {tool!r:.60}"
        raise ThreestepError(f"{where}: tools: expected a JSON list of objects, got {got}")
    read = {key: _parsed_text(value) if key in _IN_TOOLS else value for key, value in tool.items()}
    if isinstance(function := read.get("function"), dict):
        read["function"] = _read_tool(function, where)
    return read


def from_json(value: Any, where: str, expected: str) -> Any:
    """The value of JSON text (also of JSON text in JSON text), None for blank text; any other value as it is. Raises
    ThreestepError for other text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return _parsed_text(parse_json(value))
    except json.JSONDecodeError as error:
        raise ThreestepError(
            f"{where}: expected {expected}, got text that is not JSON ({error.msg}): {value[:60]!r}{python_hint(value)}"
        ) from error


def _parsed_text(value: Any) -> Any:
    """The list or object of JSON text, also of JSON text in JSON text; any other value as it is."""
    parsed = value
    while isinstance(parsed, str):
        if (inner := _parsed(parsed)) is parsed:
            return value
        parsed = inner
    return parsed if isinstance(parsed, (list, dict)) else value


def check_json(value: Any, where: str) -> None:
    """Raise ThreestepError for a date, a time or a decimal number in a value: a file's typed column has changed how it
    was written."""
    if isinstance(value, (date, time, timedelta, Decimal)):
        raise ThreestepError(
            f"{where}: expected JSON values, got a {type(value).__name__} ({value}); write it as text, or as a number"
        )
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_json(inner, where)


# Checked, for a chat template.


def checked_messages(messages: Any, where: str, images: bool = False, unread: str = ONLY_TEXT) -> list[Message]:
    """Messages as dictionaries with `role` and `content` (text, or None next to tool calls; typed parts are joined, but
    with `images` for those of a message that holds some). unread: why images are not read, for the sentence.

    Keys whose value is None are left out. Tool calls become objects; their arguments stay an object or its JSON text,
    as given (see `forms_of_calls`). Raises BadConversation for anything that is not a message, and for a role outside
    `ROLES`.
    """
    messages = _plain(messages)
    if not isinstance(messages, list):
        raise BadConversation(f"{where}: expected a list of messages, got {kind_of(messages)}")
    named = ((message, f"{where}, message {number}") for number, message in enumerate(messages, start=1))
    return [_checked(message, place, images, unread) for message, place in named]


def _checked(message: Any, where: str, images: bool, unread: str) -> Message:
    if not isinstance(message, dict):
        raise BadConversation(f"{where}: expected an object with role and content, got {kind_of(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise BadConversation(
            f"{where}: expected one of the roles {', '.join(ROLES)}, got {role!r}{nearest_names(str(role), ROLES)}; "
            "rename it in the data"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    for key in REASONING_KEYS:
        if not isinstance(checked.get(key, ""), str):
            raise BadConversation(f"{where}: expected {key} to be text, got {kind_of(checked[key])}")
    if "tool_calls" in checked:
        calls = _parsed(checked["tool_calls"])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadConversation(f"{where}: expected tool_calls to be a list of objects, got {calls!r:.60}")
        checked["tool_calls"] = [_checked_call(call) for call in calls]
        if not calls:
            del checked["tool_calls"]
    checked.setdefault("content", None if "tool_calls" in checked else "")
    content = checked["content"] = joined_text(checked, where, images, unread)
    if not isinstance(content, (str, list) if images else str) and content is not None:
        raise BadConversation(
            f"{where}: expected content that is text or a list of parts such as "
            f'{{"type": "text", "text": ...}}, got {content!r:.60}'
        )
    return checked


def _checked_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call without keys whose value is None."""
    is_call = "arguments" in call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _checked_call(call["function"])
    if is_call:
        call["arguments"] = _given_arguments(call.get("arguments"))
    return call


def checked_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools as a list of objects, given as such, as JSON text of it or as a list of JSON texts; None for no tools."""
    tools = _parsed_text(_plain(tools))
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, list):
        raise BadConversation(f"{where}: expected tools to be a list of objects or its JSON text, got {tools!r:.60}")
    try:
        return [_read_tool(tool, where) for tool in tools]
    except ThreestepError as refusal:
        raise BadConversation(str(refusal)) from refusal


def _given_arguments(value: Any) -> Any:
    """The arguments of a call as they are given; an empty object for none: null, "null" or blank text."""
    return {} if value is None or (isinstance(value, str) and value.strip() in ("", "null")) else value


def forms_of_calls(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages, and the same in other forms that mean the same, as a chat template may want them: the arguments of
    calls as objects (of which `tojson` makes JSON) or as JSON text (OpenAI's form, which DeepSeek's templates join to
    other text), and no content beside a call as None (DeepSeek's) or as "" (what templates add to other text)."""
    seen: list[list[Message]] = []
    for arguments in (None, _object_of, _text_of):
        for blank in (_AS_GIVEN, None, ""):
            form = [_in_form(message, arguments, blank) for message in messages]
            if form not in seen:
                seen.append(form)
                yield form


def _in_form(message: Message, arguments: Callable[[Any], Any] | None, blank: Any) -> Message:
    if not message.get("tool_calls"):
        return message
    form = dict(message)
    if blank is not _AS_GIVEN and form.get("content") in (None, ""):
        form["content"] = blank
    if arguments is not None:
        form["tool_calls"] = [_call_in_form(call, arguments) for call in message["tool_calls"]]
    return form


def _call_in_form(call: dict[str, Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    call = dict(call)
    if isinstance(call.get("function"), dict):
        call["function"] = _call_in_form(call["function"], arguments)
    if "arguments" in call:
        call["arguments"] = arguments(call["arguments"])
    return call


def _object_of(value: Any) -> Any:
    """The object that JSON text holds; any other value (also what a model wrote wrongly) as it is."""
    parsed = _parsed(value)
    return parsed if isinstance(parsed, dict) else value


def _text_of(value: Any) -> Any:
    """The JSON text of an object; any other value as it is."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _parsed(value: Any) -> Any:
    """The value of JSON text; any other value as it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Lists, dictionaries and Python scalars in place of Arrow's and NumPy's."""
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


# From plain text.


def messages_of_text(prompt: str) -> list[Message]:
    """A plain prompt as messages: one user message of the text as it is, or without DeepSpeed-Chat's "Human: ...
    Assistant:" around it.

    Inside that wrapping, "Human:" or "Assistant:" after an empty line begins another message, as in Anthropic's
    hh-rlhf. The space behind a speaker, and the space or empty line before the next one, belong to the wrapping.
    """
    inside = _unwrapped(prompt)
    if inside is None:
        return [{"role": "user", "content": prompt}]
    turns = ["Human", *_TURN.split(inside)]
    turns[-1] = _BEFORE_SPEAKER.sub("", turns[-1])
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": turn.removeprefix(" ")}
        for name, turn in zip(turns[::2], turns[1::2], strict=True)
    ]


def response_message(prompt: str, response: str) -> Message:
    """A plain response as the assistant's message; to a wrapped prompt, without the space that begins it."""
    return {"role": "assistant", "content": response if _unwrapped(prompt) is None else response.removeprefix(" ")}


def _unwrapped(prompt: str) -> str | None:
    """The text between "Human:" and "Assistant:"; None without that wrapping."""
    text = prompt.strip()
    is_wrapped = text.startswith(_HUMAN) and text.endswith(_ASSISTANT)
    return text[len(_HUMAN) : -len(_ASSISTANT)] if is_wrapped else None


# To plain text, for models and tokenizers without a chat template.


def prompt_text(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, where: str, frame: tuple[str, str] = FRAME
) -> str:
    """DeepSpeed-Chat's text of the messages that a response answers. frame: see `SavedStyle`.

    [user "Hi"], [assistant "Yes?"], [user "Sing."] become "Human: Hi Assistant: Yes? Human: Sing. Assistant:".
    A system message begins with "System:", a tool's with "Tool:". Tools come first, as JSON after "Tools:".
    """
    turns = [f"Tools: {json.dumps(tools, ensure_ascii=False)}"] if tools else []
    turns += [_turn(message, where) for message in messages]
    begin, end = frame
    return begin + end.partition(_ASSISTANT)[0].join([*turns, end.lstrip()])


def stored_prompt(messages: Sequence[Message], where: str) -> str:
    """The last message's text as it is, of a model whose rows have prompts as stored: it was asked one question at a
    time. ThreestepError for a system prompt, which no such row has."""
    if messages and messages[0]["role"] == "system":
        raise ThreestepError(
            f"{where}: expected no system prompt, because the model was trained on prompts as stored (as_stored), but "
            "got one; move it into the question"
        )
    return _content(messages[-1], where) if messages else ""


def response_text(messages: Sequence[Message], where: str) -> str:
    """The text that follows `prompt_text`: " ..." of the first message, the assistant's, then any turns after it."""
    return " ".join(["", _content(messages[0], where), *(_turn(message, where) for message in messages[1:])])


def _turn(message: Message, where: str) -> str:
    speaker = SPEAKERS.get(message["role"])
    if speaker is None:
        raise ThreestepError(
            f"{where}: a message's role: expected one of {', '.join(SPEAKERS)}, got {message['role']!r}"
        )
    return f"{speaker}: {_content(message, where)}"


def _content(message: Message, where: str) -> str:
    if len(message) == 2 and isinstance(message["content"], str):  # beside the role
        return message["content"]
    given = "" if message["content"] is None and message.get("tool_calls") else message["content"]
    content = ""
    for part in given if isinstance(given, list) else [given]:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise ThreestepError(f"{where}: a message's content: expected text, got {part!r}"[:200])
        content += text
    thought = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    functions = [_call_in_form(call.get("function", call), _object_of) for call in message.get("tool_calls", ())]
    calls = [json.dumps(function, ensure_ascii=False) for function in functions]
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n".join(filter(None, [content, *calls]))


def response_begins(messages: Sequence[dict[str, Any]]) -> int:
    """The index of the last message if it is the assistant's, otherwise the number of messages."""
    answered = bool(messages) and messages[-1].get("role") == "assistant"
    return len(messages) - answered


def image_values(row: Mapping[str, Any], where: str) -> list[Any]:
    """The values in a row's column `images` (TRL, verl, LLaMA-Factory) or `image` (TRL): a list, its JSON text, or one
    image; none of an empty one.

    Raises BadConversation where both columns hold something.
    """
    held = [column for column in IMAGE_COLUMNS if not is_empty(row.get(column))]
    if len(held) > 1:
        raise BadConversation(f"{where}: expected images in one column, got both 'images' and 'image'; remove one")
    if not held:
        return []
    value = row[held[0]]
    if isinstance(value, str) and value.startswith("["):  # of CSV
        value = from_json(value, f"{where}, column '{held[0]}'", "a list of images")
    return list(value) if isinstance(value, (list, tuple)) else [value]


SPELLINGS = ("weight", "loss_mask", "train", "training", "loss", "loss_weight", "step_loss_mask")
# Other keys of such names would be weights that are not read: train_detail, loss_scale, mask, ...
_LIKE_A_WEIGHT = re.compile(r"(^|_)(loss|weights?|mask(ed)?|train(ed|s|ing|able)?|learn(able)?)(_|$)")


def has_weights(messages: Sequence[Any]) -> bool:
    """True if any message has a key that looks like a weight."""
    return any(_is_like_a_weight(str(key)) for message in messages for key in message)


@lru_cache(maxsize=1024)  # a run's messages have few keys
def _is_like_a_weight(key: str) -> bool:
    return _LIKE_A_WEIGHT.search(key) is not None


def split_weights(messages: Sequence[Message], where: str) -> tuple[list[Message], list[bool | None]]:
    """The messages without their weights, and the weights: whether each is trained, None if it has no weight.

    Raises BadConversation for a weight other than 0 and 1, for two that differ, and for a key that looks like a weight
    and is none of `SPELLINGS`.
    """
    bare = [{key: value for key, value in message.items() if key not in SPELLINGS} for message in messages]
    return bare, [_weight(message, f"{where}, message {number}") for number, message in enumerate(messages, start=1)]


def _weight(message: Message, where: str) -> bool | None:
    weights: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or not isinstance(key, str) or not _LIKE_A_WEIGHT.search(key):
            continue
        if key not in SPELLINGS:
            raise BadConversation(
                f"{where}: the key '{key}' looks like a loss weight but is not read; expected one of "
                f"{', '.join(SPELLINGS)} with 0 or 1, got {value!r:.60}; rename or remove it"
            )
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadConversation(
                f"{where}: '{key}': expected 0 or 1 (false or true), got {value!r:.60}; a message either carries "
                "loss or does not"
            )
        weights[key] = bool(value)
    if len(set(weights.values())) > 1:
        raise BadConversation(f"{where}: {' and '.join(f'{key!r}' for key in weights)} differ; remove one of them")
    return next(iter(weights.values()), None)


def check_weights(messages: Sequence[Message], weights: Sequence[bool | None], loss_on: str, where: str) -> None:
    """Raise BadConversation for a weight that the loss of phase 1 (`--loss_on`) cannot honour."""
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True), start=1):
        named = f"{where}, message {number} ({message.get('role')})"
        if weight is False and loss_on == "conversation":
            raise BadConversation(
                f"{named}: its weight is 0, but --loss_on conversation puts loss on every message; remove one of them"
            )
        if weight and loss_on != "conversation" and message.get("role") != "assistant":
            raise BadConversation(
                f"{named}: its weight is 1, but only the assistant's messages carry loss; set it to 0, or use "
                "--loss_on conversation"
            )
