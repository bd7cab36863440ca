"""Readers of a row in each format: its prompt and responses, or a response with its mark, good or bad (TRL's and
OpenRLHF's `label`, LLaMA-Factory's `kto_tag`; as truth values, numbers or words). Conversation trees, one message a
row, as conversations. Knows nothing of which format a file has."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import FileRow, Kinds, kind_of
from training.utils.data.formats.messages import (
    Message,
    messages_of_text,
    read_messages,
    response_begins,
    response_message,
)

# Role -> column: {"prompt": "instruction", ...}.
Roles = dict[str, str]
_INSTRUCTION_ROLES = ("instruction", "prompt", "input", "chosen", "rejected", "system")


@dataclass(slots=True)
class Record:
    """A prompt and its responses, as texts exactly as stored or as messages, never both."""

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    responses: list[str] | None = None
    prompt_messages: list[Message] | None = None
    chosen_messages: list[Message] | None = None
    rejected_messages: list[Message] | None = None

    def as_rejected(self) -> Record:
        """The same with its response as the worse one, without a better one."""
        return replace(
            self,
            chosen=None,
            rejected=self.chosen,
            responses=None,
            chosen_messages=None,
            rejected_messages=self.chosen_messages,
        )


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, dots reaching into objects (`reward_model.ground_truth`); None where there is none."""
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _response_of(row: Mapping[str, Any], roles: Roles, role: str, where: str) -> Any:
    """The value of a response's column, a number as text; ThreestepError for one that more than one text stands for."""
    value = value_of(row, roles[role]) if role in roles else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float) and (value.is_integer() or not math.isfinite(value)):
        raise ThreestepError(
            f"{where}: column '{roles[role]}': expected text or a number with only one spelling, got {value!r}; "
            "write it as text"
            + (f', "{int(value)}" or "{value!r}"' if math.isfinite(value) else ", or null if there is none")
        )
    return repr(value)


def read_pair(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    prompt = value_of(row, roles["prompt"]) if "prompt" in roles else None
    chosen, rejected = (_response_of(row, roles, role, where) for role in ("chosen", "rejected"))
    system = [{"role": "system", "content": system_text}] if (system_text := _text(row, roles, "system", where)) else []
    if all(value is None or isinstance(value, str) for value in (prompt, chosen, rejected)):
        if "system" in roles and prompt is not None:
            return Record(
                prompt_messages=[*system, *messages_of_text(prompt)],
                chosen_messages=None if chosen is None else [response_message(prompt, chosen)],
                rejected_messages=None if rejected is None else [response_message(prompt, rejected)],
            )
        if "prompt" not in roles and chosen is not None and rejected is not None:
            begin = _shared_text(chosen, rejected)
            return Record(chosen[:begin], chosen[begin:], rejected[begin:])
        return Record(prompt, chosen, rejected)
    prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_messages(prompt, where)
    better, worse = _read_response(chosen, where), _read_response(rejected, where)
    given = [answer for answer in (better, worse) if answer]
    if given and all(answer[0]["role"] != "assistant" for answer in given):
        begin = _shared_messages(given)
        prompt_messages, better, worse = given[0][:begin], better and better[begin:], worse and worse[begin:]
    if system and prompt_messages and prompt_messages[0]["role"] != "system":
        prompt_messages = [*system, *prompt_messages]
    return _of_messages(prompt_messages, better, worse, where)


def _of_messages(
    prompt: list[Message] | None, chosen: list[Message] | None, rejected: list[Message] | None, where: str
) -> Record:
    for answer in (chosen, rejected):
        if answer and answer[0]["role"] != "assistant":
            raise ThreestepError(
                f"{where}: a response: expected an assistant message first, got one with the role '{answer[0]['role']}'"
            )
    return Record(prompt_messages=prompt, chosen_messages=chosen or None, rejected_messages=rejected or None)


def _read_response(value: Any, where: str) -> list[Message] | None:
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else read_messages(value, where)


def _shared_messages(answers: list[list[Message]]) -> int:
    """Number of messages that all share, up to the assistant's in which they differ (the last, if all are equal)."""
    shortest = min(answers, key=len)
    same = 0
    while same < len(shortest) - 1 and all(answer[same] == shortest[same] for answer in answers):
        same += 1
    while same > 0 and not all(answer[same]["role"] == "assistant" for answer in answers):
        same -= 1
    return same


def _shared_text(chosen: str, rejected: str) -> int:
    """The prompt's length: to the last "Assistant:" in the texts' common beginning, without one to its last blank."""
    same = len(os.path.commonprefix([chosen, rejected]))
    speaker = chosen.rfind("Assistant:", 0, same)
    if speaker >= 0:
        return speaker + len("Assistant:")
    return max((at for at in range(same) if chosen[at].isspace()), default=0)


def read_conversation(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    messages = read_messages(value_of(row, roles["messages"]), where)
    if messages is None:
        return Record()
    system = row.get(roles["system"]) if "system" in roles else None
    if system and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    if "chosen" in roles:
        chosen, rejected = (
            _read_response(_response_of(row, roles, role, where), where) for role in ("chosen", "rejected")
        )
        return _of_messages(messages, chosen, rejected, where)
    cut = response_begins(messages)
    return Record(prompt_messages=messages[:cut], chosen_messages=messages[cut:] or None)


def read_instruction(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    texts = {role: _text(row, roles, role, where) for role in _INSTRUCTION_ROLES if role in roles}
    prompt = texts.get("prompt")
    if prompt is None:
        return Record()
    system = texts.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for turn in value_of(row, roles["history"]) or [] if "history" in roles else []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ThreestepError(f"{where}: history: expected a list of [question, answer], got {turn!r}"[:200])
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(filter(None, [texts.get("instruction"), prompt, texts.get("input")]))
    messages.append({"role": "user", "content": question})
    chosen, rejected = (_read_response(texts.get(role), where) for role in ("chosen", "rejected"))
    return _of_messages(messages, chosen, rejected, where)


def read_ranked(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    responses = value_of(row, roles["responses"]) or []
    if not isinstance(responses, list) or not all(isinstance(response, str) for response in responses):
        raise ThreestepError(
            f"{where}: column '{roles['responses']}': expected a list of strings, best first, got {responses!r}"[:300]
        )
    several = responses if len(responses) > 1 else None
    return Record(_text(row, roles, "prompt", where), responses[0] if responses else None, responses=several)


def read_text(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
    return Record("", _text(row, roles, "text", where))


def _text(row: Mapping[str, Any], roles: Roles, role: str, where: str) -> str | None:
    is_response = role in ("chosen", "rejected")
    value = _response_of(row, roles, role, where) if is_response else value_of(row, roles.get(role, ""))
    if value is not None and not isinstance(value, str):
        raise ThreestepError(f"{where}: column '{roles[role]}': expected text, got {kind_of(value)}")
    return value


COLUMNS = ("kto_tag", "label")
_GOOD = ("true", "1", "1.0", "yes", "good", "desirable", "chosen", "positive")
_BAD = ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected", "negative")


def read_mark(row: Mapping[str, Any], column: str, where: str) -> bool | None:
    """True if a row's response is marked as good; None without a mark. Raises ThreestepError for any other value."""
    value = value_of(row, column)
    word = str(value).strip().lower()
    if value is None or not word:
        return None
    if not isinstance(value, (bool, int, float, str)) or word not in (*_GOOD, *_BAD):
        raise ThreestepError(
            f"{where}: column '{column}': expected a label for the response, such as true or false, 1 or 0, desirable "
            f"or undesirable, got {value!r:.60}; name the label column with --label_column (none: no labels)"
        )
    return word in _GOOD


def reader_of_marked(
    read: Callable[[Mapping[str, Any], Roles, str], Record],
) -> Callable[[Mapping[str, Any], Roles, str], Record]:
    """A reader of rows whose responses are marked: a bad response is the record's rejected one."""

    def read_marked(row: Mapping[str, Any], roles: Roles, where: str) -> Record:
        record = read(row, roles, where)
        return record.as_rejected() if read_mark(row, roles["label"], where) is False else record

    return read_marked


# Conversation trees, one message a row: OASST's `message_id`, `parent_id`, `role` and `text`.

_ID, _PARENT, _ROLE, _TEXT = "message_id", "parent_id", "role", "text"
_ROLES = {"prompter": "user"}
_ASSISTANT = "assistant"


def holds_trees(kinds: Kinds) -> bool:
    """True if a file with these columns holds one message a row."""
    return all(column in kinds for column in (_ID, _PARENT, _ROLE, _TEXT))


class TreeRows(Sequence):
    """The conversations in such rows, each built when it is read.

    Each message of the assistant becomes a row: the messages from the root of its tree to it. Messages of the assistant
    before it are rows of their own: here they carry no loss, so each is learnt once. Messages marked as `deleted`, and
    those below them, are left out. The constructor reads all rows once. It raises ThreestepError for a message without
    a role or an id of its own, and where a parent is missing or follows from itself.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.nulls = rows.nulls
        self.kinds: Kinds = {column: kinds for column, kinds in rows.kinds.items() if column not in (_ROLE, _TEXT)}
        self.kinds["messages"] = {"a list": next(iter(rows.kinds[_TEXT].values()), "the file")}
        places: dict[Any, int] = {}
        answers, deleted = [], set()
        for place in range(len(rows)):
            row = rows[place]
            if not isinstance(row.get(_ID), (str, int)) or row[_ID] in places:
                wrong = f"{row.get(_ID)!r:.60}" + (" a second time" if isinstance(row.get(_ID), (str, int)) else "")
                raise ThreestepError(f"{row.where}: column '{_ID}': expected a unique id, got {wrong}")
            if not isinstance(row.get(_ROLE), str):
                raise ThreestepError(f"{row.where}: column '{_ROLE}': expected text, got {kind_of(row.get(_ROLE))}")
            places[row[_ID]] = place
            answers += [place] if row[_ROLE] == _ASSISTANT else []
            deleted |= {place} if row.get("deleted") is True else set()
        self._parents = [self._parent_of(place, places) for place in range(len(rows))]
        self._answers = [place for place in answers if deleted.isdisjoint(self._path(place))]

    def _parent_of(self, place: int, places: dict[Any, int]) -> int | None:
        row = self._rows[place]
        parent = row.get(_PARENT)
        if parent in (None, ""):
            return None
        if not isinstance(parent, (str, int)) or parent not in places:
            raise ThreestepError(
                f"{row.where}: column '{_PARENT}': expected the id of a message in the same files, got {parent!r:.60}; "
                "include all messages of a tree, or none"
            )
        return places[parent]

    def _path(self, place: int) -> Iterator[int]:
        """A message and those before it, from the last to the first."""
        at: int | None = place
        seen: set[int] = set()
        while at is not None:
            if at in seen:
                raise ThreestepError(f"{self._rows[place].where}: the message is its own ancestor through '{_PARENT}'")
            seen.add(at)
            yield at
            at = self._parents[at]

    @property
    def sentence(self) -> str:
        """Counts of messages and answers, for a log."""
        return f"conversation trees ({len(self._rows):,} messages, {len(self):,} of them answers, each with its prompt)"

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: Any) -> Any:
        path = [self._rows[place] for place in self._path(self._answers[int(index)])][::-1]
        messages = [{"role": _ROLES.get(row[_ROLE], row[_ROLE]), "content": row.get(_TEXT)} for row in path]
        for message in messages[:-1]:
            if message["role"] == _ASSISTANT:
                message["train"] = False
        answer = path[-1]
        rest = {column: value for column, value in answer.items() if column not in (_ROLE, _TEXT)}
        return FileRow({**rest, "messages": messages}, answer.where)
