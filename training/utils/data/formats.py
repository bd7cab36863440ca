"""Formats of rows: which columns a file must have to be read as one, and what a row of it says.

A file's format is recognised from its columns; flags name columns, or the format itself. Two formats that both
fit are an error that names the flags which decide. Knows nothing of files or tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from training.utils.data.message_forms import Message, read_messages
from training.utils.data.raw_dataset import response_begins
from training.utils.data.readers import Kinds, column_names, kind_of
from training.utils.run.errors import ThreestepError, nearest_names


@dataclass(frozen=True)
class Columns:
    """The columns that flags name; None: the format's own name. A dot reaches into an object, as in
    `extra_info.answer`."""

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    responses: str | None = None
    messages: str | None = None
    text: str | None = None
    tools: str | None = None
    reference: str | None = None
    margin: str | None = None


# Columns that decide on the format; the others only say where something stands.
_DECIDING = ("prompt", "chosen", "rejected", "responses", "messages", "text")


@dataclass(frozen=True)
class Record:
    """What a row says: a prompt and its responses, as texts taken as stored or as messages, never both."""

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    responses: list[str] | None = None
    prompt_messages: list[Message] | None = None
    chosen_messages: list[Message] | None = None
    rejected_messages: list[Message] | None = None


# What a role of a format is called in a file: {"prompt": "instruction", ...}.
Roles = dict[str, str]


@dataclass(frozen=True)
class Format:
    """A format, bound to a file's columns."""

    name: str
    roles: Roles
    read: Callable[[Mapping[str, Any], Roles, str], Record]

    @property
    def has_responses(self) -> bool:
        return bool({"chosen", "messages", "responses", "text"} & self.roles.keys())


@dataclass(frozen=True)
class _Kind:
    """A format as such. `needs` is its columns, for errors; `match` gives the roles that a file's columns play in
    it, None where it does not fit."""

    needs: str
    match: Callable[[Kinds, Columns], Roles | None]
    read: Callable[[Mapping[str, Any], Roles, str], Record]
    # role -> the kinds of values that may stand there; the roles not named here hold text
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """What stands in a column, or behind the dots of `reward_model.ground_truth`; None where nothing does."""
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def has_column(kinds: Kinds, column: str) -> bool:
    """Whether a file has a column; of one with dots, whether it has what stands before the first."""
    return column in kinds or column.partition(".")[0] in kinds


# Which columns fit.


def _roles(kinds: Kinds, needed: Mapping[str, str], optional: Mapping[str, str]) -> Roles | None:
    """Role -> column where every needed column is there; optional ones where they are."""
    if not all(has_column(kinds, column) for column in needed.values()):
        return None
    return {**needed, **{role: column for role, column in optional.items() if has_column(kinds, column)}}


def _first(kinds: Kinds, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in kinds), None)


def _match_conversation(default: str) -> Callable[[Kinds, Columns], Roles | None]:
    """ShareGPT's and OpenAI's: a column of messages, and where the responses of a pair stand beside it as one
    message each, those."""

    def match(kinds: Kinds, columns: Columns) -> Roles | None:
        optional = {"system": "system"}
        for role, asked in (("chosen", columns.chosen), ("rejected", columns.rejected)):
            if asked or "an object" in kinds.get(role, ()):
                optional[role] = asked or role
        return _roles(kinds, {"messages": columns.messages or default}, optional)

    return match


def _match_pair(kinds: Kinds, columns: Columns) -> Roles | None:
    """prompt, chosen and rejected; the prompt may be the beginning that both responses share."""
    chosen, rejected = columns.chosen or "chosen", columns.rejected or "rejected"
    prompt = columns.prompt or "prompt"
    if columns.prompt or has_column(kinds, prompt):
        return _roles(kinds, {"prompt": prompt, "chosen": chosen}, {"rejected": rejected})
    if _first(kinds, ("instruction", "question", "conversations", "messages")):
        return None
    return _roles(kinds, {"chosen": chosen, "rejected": rejected}, {})


def _match_completion(kinds: Kinds, columns: Columns) -> Roles | None:
    names = ("completion",) if "chosen" in kinds else ("completion", "response")
    response = columns.chosen or _first(kinds, names)
    if response is None:
        return None
    optional = {"label": "label"} if "a truth value" in kinds.get("label", ()) else {}
    return _roles(kinds, {"prompt": columns.prompt or "prompt", "chosen": response}, optional)


def _match_prompt(kinds: Kinds, columns: Columns) -> Roles | None:
    return _roles(kinds, {"prompt": columns.prompt or "prompt"}, {})


def _match_alpaca(kinds: Kinds, columns: Columns) -> Roles | None:
    context = _first(kinds, ("input", "context")) or "input"
    response = columns.chosen or _first(kinds, ("output", "response", "chosen")) or "output"
    optional = {"input": context, "rejected": columns.rejected or "rejected", "system": "system", "history": "history"}
    return _roles(kinds, {"prompt": columns.prompt or "instruction", "chosen": response}, optional)


def _match_question(kinds: Kinds, columns: Columns) -> Roles | None:
    needed = {"prompt": columns.prompt or "question", "chosen": columns.chosen or "answer"}
    return _roles(kinds, needed, {"rejected": columns.rejected or "rejected"})


def _match_ranked(kinds: Kinds, columns: Columns) -> Roles | None:
    return _roles(kinds, {"prompt": columns.prompt or "prompt", "responses": columns.responses or "responses"}, {})


def _match_text(kinds: Kinds, columns: Columns) -> Roles | None:
    return _roles(kinds, {"text": columns.text or "text"}, {})


# What a row says.


def _read_pair(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    prompt, chosen, rejected = (
        value_of(row, roles[role]) if role in roles else None for role in ("prompt", "chosen", "rejected")
    )
    if "label" in roles and row.get(roles["label"]) is False:
        chosen, rejected = None, chosen
    if all(value is None or isinstance(value, str) for value in (prompt, chosen, rejected)):
        if "prompt" not in roles and chosen is not None and rejected is not None:
            begin = _shared_text(chosen, rejected)
            return Record(chosen[:begin], chosen[begin:], rejected[begin:])
        return Record(prompt, chosen, rejected)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_messages(prompt, where)
    better, worse = _read_response(chosen, where), _read_response(rejected, where)
    given = [answer for answer in (better, worse) if answer]
    if given and all(answer[0]["role"] != "assistant" for answer in given):
        begin = _shared_messages(given)
        asked, better, worse = given[0][:begin], better and better[begin:], worse and worse[begin:]
    return _of_messages(asked, better, worse, where)


def _of_messages(
    prompt: list[Message] | None, chosen: list[Message] | None, rejected: list[Message] | None, where: str
) -> Record:
    for answer in (chosen, rejected):
        if answer and answer[0]["role"] != "assistant":
            raise ThreestepError(
                f"{where}: a response: expected the assistant's message first, got one of role '{answer[0]['role']}'"
            )
    return Record(prompt_messages=prompt, chosen_messages=chosen or None, rejected_messages=rejected or None)


def _read_response(value: Any, where: str) -> list[Message] | None:
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else read_messages(value, where)


def _shared_messages(answers: list[list[Message]]) -> int:
    """How many messages are the prompt of conversations that are whole: those that all share, up to the
    assistant's message in which they part (of one conversation, or of equal ones, up to the last)."""
    shortest = min(answers, key=len)
    same = 0
    while same < len(shortest) - 1 and all(answer[same] == shortest[same] for answer in answers):
        same += 1
    while same > 0 and not all(answer[same]["role"] == "assistant" for answer in answers):
        same -= 1
    return same


def _shared_text(chosen: str, rejected: str) -> int:
    """How many characters are the prompt of texts that are whole: up to the last "Assistant:" in what both begin
    with, or without one up to the last blank."""
    same = len(os.path.commonprefix([chosen, rejected]))
    speaker = chosen.rfind("Assistant:", 0, same)
    if speaker >= 0:
        return speaker + len("Assistant:")
    return max((at for at in range(same) if chosen[at].isspace()), default=0)


def _read_conversation(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    messages = read_messages(value_of(row, roles["messages"]), where)
    if messages is None:
        return Record()
    system = row.get(roles["system"]) if "system" in roles else None
    if system and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    if "chosen" in roles:
        chosen, rejected = (
            _read_response(value_of(row, roles[role]), where) if role in roles else None
            for role in ("chosen", "rejected")
        )
        return _of_messages(messages, chosen, rejected, where)
    cut = response_begins(messages)
    return Record(prompt_messages=messages[:cut], chosen_messages=messages[cut:] or None)


def _read_instruction(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    prompt, context, chosen, rejected, system = (
        _text(row, roles, role, where) for role in ("prompt", "input", "chosen", "rejected", "system")
    )
    if prompt is None:
        return Record()
    messages = [{"role": "system", "content": system}] if system else []
    for turn in value_of(row, roles["history"]) or [] if "history" in roles else []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(said, str) for said in turn)):
            raise ThreestepError(f"{where}: history: expected a list of [question, answer], got {turn!r}"[:200])
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": "\n".join(filter(None, [prompt, context]))})
    return _of_messages(messages, _read_response(chosen, where), _read_response(rejected, where), where)


def _read_ranked(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    responses = value_of(row, roles["responses"]) or []
    if not isinstance(responses, list) or not all(isinstance(response, str) for response in responses):
        raise ThreestepError(
            f"{where}: column '{roles['responses']}': expected a list of texts, best first, got {responses!r}"[:300]
        )
    several = responses if len(responses) > 1 else None
    return Record(_text(row, roles, "prompt", where), responses[0] if responses else None, responses=several)


def _read_text(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    return Record("", _text(row, roles, "text", where))


def _text(row: Mapping[str, Any], roles: Roles, role: str, where: str) -> str | None:
    value = value_of(row, roles[role]) if role in roles else None
    if value is not None and not isinstance(value, str):
        raise ThreestepError(f"{where}: column '{roles[role]}': expected text, got {kind_of(value)}")
    return value


_RESPONSE = ("text", "a list", "an object")
_PAIR = {"prompt": ("text", "a list"), "chosen": _RESPONSE, "rejected": _RESPONSE, "label": ("a truth value",)}
_CONVERSATION = {"messages": ("a list", "text"), "chosen": _RESPONSE, "rejected": _RESPONSE}

FORMATS: dict[str, _Kind] = {
    "preference": _Kind("prompt, chosen, rejected", _match_pair, _read_pair, _PAIR),
    "prompt_completion": _Kind("prompt, completion", _match_completion, _read_pair, _PAIR),
    "prompt_only": _Kind("prompt", _match_prompt, _read_pair, _PAIR),
    "messages": _Kind("messages", _match_conversation("messages"), _read_conversation, _CONVERSATION),
    "sharegpt": _Kind("conversations", _match_conversation("conversations"), _read_conversation, _CONVERSATION),
    "alpaca": _Kind("instruction, output", _match_alpaca, _read_instruction, {"history": ("a list",)}),
    "question_answer": _Kind("question, answer", _match_question, _read_instruction),
    "ranked": _Kind("prompt, responses", _match_ranked, _read_ranked, {"responses": ("a list",)}),
    "text": _Kind("text", _match_text, _read_text),
}
# A prompt beside one of these is its own prompt; beside another format's columns it may be either.
_HOLD_A_PROMPT = ("preference", "prompt_completion", "messages", "sharegpt")


def check_format(name: str | None) -> None:
    """Raise ThreestepError where `--data_format` names none."""
    if name is not None and name not in FORMATS:
        raise ThreestepError(
            f"data_format: expected one of {', '.join(FORMATS)}, got '{name}'{nearest_names(name, FORMATS)}"
        )


def recognise(kinds: Kinds, columns: Columns, data_format: str | None, where: str) -> Format:
    """The format of a file with these columns. `columns` and `data_format` are what flags name.

    Raises ThreestepError, which begins with `where`, where no format fits, where two do, where flags contradict
    each other, and where a column holds what the format has no use for.
    """
    check_format(data_format)
    if data_format is not None:
        name, roles = data_format, FORMATS[data_format].match(kinds, columns)
        if roles is None:
            raise ThreestepError(
                f"{where}: --data_format {name} expects the columns {FORMATS[name].needs}, and the columns are "
                f"{column_names(kinds)}; choose another format, or name its columns with flags such as "
                "--prompt_column"
            )
    elif any(getattr(columns, role) for role in _DECIDING):
        name, roles = _format_of_flags(kinds, columns, where)
    else:
        name, roles = _only_fit(kinds, columns, where)
    _check_kinds(kinds, roles, FORMATS[name].allowed)
    return Format(name, roles, FORMATS[name].read)


def _only_fit(kinds: Kinds, columns: Columns, where: str) -> tuple[str, Roles]:
    fits = {name: roles for name, kind in FORMATS.items() if (roles := kind.match(kinds, columns)) is not None}
    fits.pop("ranked", None)  # that a list of responses is in the order of their worth, a flag must say
    if fits.keys() & set(_HOLD_A_PROMPT):
        fits.pop("prompt_only", None)
    if len(fits) == 1:
        return next(iter(fits.items()))
    found = f"{where}: the columns {column_names(kinds)} fit "
    if fits:
        deciding = " or ".join(f"--data_format {name}" for name in fits)
        raise ThreestepError(f"{found}{len(fits)} formats, {' and '.join(fits)}; decide with {deciding}")
    known = "; ".join(f"{kind.needs} ({name})" for name, kind in FORMATS.items())
    raise ThreestepError(
        f"{found}no format; expected the columns of one of these: {known}; or name columns of your own with "
        "--prompt_column, --chosen_column and --rejected_column, --messages_column or --text_column"
    )


def _format_of_flags(kinds: Kinds, columns: Columns, where: str) -> tuple[str, Roles]:
    """The format of the columns that flags name. One that was named for a response may be missing: not every phase
    needs it (see `FileDataset.check_phase`)."""
    asked = [role for role in _DECIDING if getattr(columns, role)]
    for role, (name, beside) in _DECIDED_BY.items():
        if role not in asked:
            continue
        if foreign := [other for other in asked if other != role and other not in beside]:
            raise ThreestepError(
                f"{where}: --{role}_column and --{foreign[0]}_column belong to different formats; leave one out"
            )
        roles = FORMATS[name].match(kinds, columns)
        if roles is None:
            missing = role if not has_column(kinds, getattr(columns, role)) else beside[0]
            raise ThreestepError(missing_column(kinds, where, getattr(columns, missing) or missing, missing))
        return name, roles

    names = {
        "prompt": columns.prompt or "prompt",
        "chosen": columns.chosen or _first(kinds, ("chosen", "completion", "response")) or "chosen",
        "rejected": columns.rejected or "rejected",
    }
    roles = {role: column for role, column in names.items() if has_column(kinds, column)}
    if "prompt" not in roles and (columns.prompt or len(roles) < 2):
        raise ThreestepError(missing_column(kinds, where, names["prompt"], "prompt"))
    if "chosen" not in roles:
        return "prompt_only", {"prompt": roles["prompt"]}
    return "preference" if "rejected" in roles else "prompt_completion", roles


# The column that decides on a format alone, and those that may be named beside it.
_DECIDED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "messages": ("messages", ("chosen", "rejected")),
    "responses": ("ranked", ("prompt",)),
    "text": ("text", ()),
}


def missing_column(kinds: Kinds, where: str, column: str, role: str) -> str:
    return (
        f"{where}: no column '{column}'; the columns are {column_names(kinds)}; name the right one with --{role}_column"
    )


def _check_kinds(kinds: Kinds, roles: Roles, allowed: Mapping[str, tuple[str, ...]]) -> None:
    """What stands in each column is what its role may hold, and of the same kind as in the first row."""
    for role, column in roles.items():
        accepted = allowed.get(role, ("text",))
        first = next(iter(kinds.get(column, ())), None)
        accepted = (first,) if first in accepted else accepted
        for kind, where in kinds.get(column, {}).items():
            if kind not in accepted:
                raise ThreestepError(f"{where}: column '{column}': expected {' or '.join(accepted)}, got {kind}")
