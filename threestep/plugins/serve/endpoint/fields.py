"""The fields of a request in OpenAI's form: each is honoured, or refused by its name in a sentence.

Knows nothing of models: what a field's text becomes is for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.base.errors import nearest_names

_MOST_SAMPLES = 128  # OpenAI's
_MOST_STOPS = 16
_MOST_ALTERNATIVES = {True: 20, False: 5}  # of a chat, of a text: OpenAI's
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class CompletionRequest:
    """A request.

    messages: of a chat; None for a text. prompts: of a text: texts, or ids of tokens.
    samples: to each prompt. seed: None draws one.
    most_tokens: of an answer; None leaves it to the server.
    sampling: of temperature, top_p, top_k and min_p those that are given.
    alternatives: log-probabilities of so many further tokens beside that of each drawn one; None: of none.
    include_usage: a stream ends with the numbers of tokens.
    """

    messages: list[dict[str, Any]] | None
    prompts: list[str | list[int]]
    samples: int = 1
    seed: int | None = None
    most_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def read_request(body: Any, is_chat: bool, model: str) -> CompletionRequest:
    """Return the request for a chat's answer or a text's end. RefusedRequest for any field that is not honoured.

    model: the name that the request must give
    """
    if not isinstance(body, dict):
        raise RefusedRequest(f"the body must be a JSON object, got {_kind(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    if "model" not in given:
        raise RefusedRequest(f"'model' must be the model's name, '{model}', but it is missing", param="model")
    if given.pop("model") != model:
        raise RefusedRequest(
            f"'model' must be '{model}', the only model on this server, got {body['model']!r:.200}",
            404,
            "model",
            "model_not_found",
        )
    readers = {**_BOTH, **(_OF_CHAT if is_chat else _OF_TEXT)}
    for name, value in given.items():
        if name not in readers:
            neutral = {**_NEUTRAL, **({} if is_chat else _NEUTRAL_OF_TEXT)}
            _check_neutral(name, value, neutral, readers)
    read = {name: readers[name](name, value) for name, value in given.items() if name in readers}
    return _together(read, is_chat)


def _together(read: dict[str, Any], is_chat: bool) -> CompletionRequest:
    needed = "messages" if is_chat else "prompt"
    if needed not in read:
        raise RefusedRequest(f"'{needed}' is required but missing", param=needed)
    most = {read[name] for name in ("max_tokens", "max_completion_tokens") if name in read}
    if len(most) > 1:
        raise RefusedRequest(
            "'max_tokens' and 'max_completion_tokens' mean the same but have different values; give one of them",
            param="max_tokens",
        )
    stream, options = read.get("stream", False), read.get("stream_options")
    if options is not None and not stream:
        raise RefusedRequest(
            "'stream_options' needs 'stream': true; set it, or leave 'stream_options' out", param="stream_options"
        )
    return CompletionRequest(
        read.get("messages"),
        read.get("prompt", []),
        read.get("n", 1),
        read.get("seed"),
        most.pop() if most else None,
        {name: read[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in read},
        read.get("stop", ()),
        _alternatives(read, is_chat),
        stream,
        bool(options),
    )


def _alternatives(read: Mapping[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        return read.get("logprobs")
    if "top_logprobs" in read and not read.get("logprobs"):
        raise RefusedRequest("'top_logprobs' needs 'logprobs': true; give both", param="top_logprobs")
    return read.get("top_logprobs", 0) if read.get("logprobs") else None


# Readers: the name of a field and its value -> what is read of it.


def _number(name: str, value: Any, least: float, most: float, *, above: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value > most or value < least or (above and value == least):
        beginning = "more than " if above else "a number from "
        raise RefusedRequest(
            f"'{name}' expects {beginning}{least:g} {'and at most' if above else 'to'} {most:g}, got {value!r:.100}",
            param=name,
        )
    return float(value)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise RefusedRequest(f"'{name}' must be a whole number from {least} to {most}, got {value!r:.100}", param=name)
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedRequest(f"'{name}' must be true or false, got {value!r:.100}", param=name)
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise RefusedRequest(
            f"'{name}' must be a text or a list of at most {_MOST_STOPS} texts, none of them empty, got {value!r:.100}",
            param=name,
        )
    return tuple(texts)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise RefusedRequest(f"'{name}' must be an object with 'include_usage', got {value!r:.100}", param=name)
    return _switch(f"{name}.include_usage", value.get("include_usage", False))


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    prompts = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise RefusedRequest(f"'{name}' must be a text, token ids, or a list of either, got {value!r:.100}", param=name)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RefusedRequest(f"'{name}' must be a list with at least one message, got {value!r:.100}", param=name)
    messages = [_message(f"{name}[{place}]", message) for place, message in enumerate(value)]
    if messages[-1]["role"] not in ("user", "tool"):
        raise RefusedRequest(
            f"'{name}' must end with a user or tool message for the model to answer, got one with role "
            f"'{messages[-1]['role']}'",
            param=name,
        )
    return messages


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedRequest(f"'{name}' must be an object with 'role' and 'content', got {value!r:.100}", param=name)
    # What clients send back of an answer: fields that are null, and lists that are empty.
    message = {key: held for key, held in value.items() if held is not None and held != []}
    role = message.get("role")
    if role not in _ROLES:
        raise RefusedRequest(f"'{name}.role' must be one of {', '.join(_ROLES)}, got {role!r:.100}", param=name)
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise RefusedRequest(
                f"'{name}.{key}' is not supported; a message may have {', '.join(_MESSAGE_KEYS)}; leave it out",
                param=name,
            )
    if role == "developer":  # OpenAI's later name
        message["role"] = "system"
    message["content"] = _content(f"{name}.content", message.get("content", ""))
    return message


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = list[str]()
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (None, "text"):
            raise RefusedRequest(
                f"'{name}' must be text, got a part of type {kind!r:.40}; this server accepts only text",
                param=name,
            )
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RefusedRequest(f"'{name}' must be a text or a list of text parts, got {part!r:.100}", param=name)
        texts.append(part["text"])
    return "".join(texts)


_Reader = Callable[[str, Any], Any]
_tokens: _Reader = partial(_whole, least=1, most=2**20)
_BOTH: dict[str, _Reader] = {
    "n": partial(_whole, least=1, most=_MOST_SAMPLES),
    "seed": partial(_whole, least=-(2**63), most=2**63 - 1),
    "max_tokens": _tokens,
    "temperature": partial(_number, least=0, most=2),
    "top_p": partial(_number, least=0, most=1, above=True),
    "top_k": partial(_whole, least=0, most=2**31),  # vLLM's, and so is the next
    "min_p": partial(_number, least=0, most=1),
    "stop": _stop,
    "stream": _switch,
    "stream_options": _stream_options,
}
_OF_CHAT: dict[str, _Reader] = {
    "messages": _messages,
    "max_completion_tokens": _tokens,
    "logprobs": _switch,
    "top_logprobs": partial(_whole, least=0, most=_MOST_ALTERNATIVES[True]),
}
_OF_TEXT: dict[str, _Reader] = {
    "prompt": _prompts,
    "logprobs": partial(_whole, least=0, most=_MOST_ALTERNATIVES[False]),
}
# Fields whose one value changes nothing. None: labels of the client's, which change nothing whatever they are.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
}
_NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...] | None] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}


def _check_neutral(
    name: str, value: Any, neutral: Mapping[str, tuple[Any, ...] | None], readers: Mapping[str, _Reader]
) -> None:
    """RefusedRequest for a field that would change the answer and is not honoured."""
    if name not in neutral:
        raise RefusedRequest(
            f"'{name}' is not supported; leave it out{nearest_names(name, [*readers, *neutral])}", param=name
        )
    values = neutral[name]
    if values is not None and value not in values:
        raise RefusedRequest(
            f"'{name}' is not supported, so it must be {' or '.join(map(repr, values))}, got {value!r:.100}; leave "
            "it out",
            param=name,
        )


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
