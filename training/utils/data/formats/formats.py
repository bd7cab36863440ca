"""Formats of rows: which columns a file needs for each, which of them a file has, and which format a source is taken
for.

A file's format is recognised by its columns; flags name columns, or the format itself. Where two formats fit, the error
names the flags that decide. Columns whose names nearly fit, in capitals or with blanks around them, are read; misspelt
ones are named in errors. Knows nothing of files or tokens, nor of how rows are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.data.files.columns import Kinds, column_names, folded, nearest_column
from training.utils.data.formats.records import COLUMNS as MARK_COLUMNS
from training.utils.data.formats.records import (
    Record,
    Roles,
    read_conversation,
    read_instruction,
    read_pair,
    read_ranked,
    read_text,
    reader_of_marked,
)

_CHOICES = ("choices", "options")  # beside which a number is an answer's place, not the answer
_NEAR = 0.7  # of difflib: `questoin` is near `question`, `title` is near nothing


def as_formats_spell(kinds: Kinds, fits: Callable[[Kinds], bool]) -> dict[str, str]:
    """A column's name as formats spell it -> the file's: `question` -> `Question`, where `fits` takes those alone;
    otherwise each name is its own."""
    plain = {folded(column): column for column in kinds}
    if len(plain) == len(kinds) and not fits(kinds) and fits({name: kinds[plain[name]] for name in plain}):
        return plain
    return {column: column for column in kinds}


def nearest_format(kinds: Iterable[str], needs: Mapping[str, str]) -> str:
    """A remark on the format whose columns the file nearly has; "" if there is none. needs: the columns of each."""
    by_folded = {folded(column): column for column in kinds}
    for name, columns in needs.items():
        near = {
            column: difflib.get_close_matches(column, by_folded, 1, _NEAR)
            for column in columns.split(", ")
            if column not in by_folded
        }
        if len(near) < len(columns.split(", ")) and all(near.values()):
            meant = " and ".join(f"'{by_folded[given[0]]}' is its '{column}'" for column, given in near.items())
            return f"; the closest is {name}, if {meant}"
    return ""


def check_numbers(kinds: Kinds, column: str) -> None:
    """ThreestepError if a column of answers holds numbers that may be places in a list of choices."""
    where = kinds.get(column, {}).get("a number")
    beside = next((name for name in kinds if folded(name) in _CHOICES), None)
    if where and beside:
        raise ThreestepError(
            f"{where}: column '{column}' holds numbers that may be positions in '{beside}'; write each answer as "
            "text in its own column, and name that column with --chosen_column"
        )


@dataclass(frozen=True)
class FileColumns:
    """The columns that flags name; None: the format's. A dot reaches into an object, as in `extra_info.answer`."""

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    responses: str | None = None
    messages: str | None = None
    text: str | None = None
    tools: str | None = None
    reference: str | None = None
    margin: str | None = None
    label: str | None = None

    @property
    def deciding(self) -> list[str]:
        """The roles of named columns that decide on the format; the others only name where a value is."""
        return [
            role for role in ("prompt", "chosen", "rejected", "responses", "messages", "text") if getattr(self, role)
        ]


@dataclass(frozen=True)
class Format:
    """A format, bound to a file's columns. why: the columns or the flags that decided on it, for the log."""

    name: str
    roles: Roles
    read: Callable[[Mapping[str, Any], Roles, str], Record]
    why: str = ""

    @property
    def has_responses(self) -> bool:
        return bool({"chosen", "messages", "responses", "text"} & self.roles.keys())


@dataclass(frozen=True)
class _Kind:
    """A format as such.

    needs: its columns, for errors.
    match: the roles that a file's columns play in it, None where it does not fit.
    allowed: role -> the kinds of values that it may hold; other roles hold text.
    """

    needs: str
    match: Callable[[Kinds, FileColumns], Roles | None]
    read: Callable[[Mapping[str, Any], Roles, str], Record]
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def has_column(kinds: Kinds, column: str) -> bool:
    """True if a file has a column; of one with dots, only the part before the first dot is looked up."""
    return column in kinds or column.partition(".")[0] in kinds


# Which columns fit.


def _roles(kinds: Kinds, needed: Mapping[str, str], optional: Mapping[str, str]) -> Roles | None:
    """Role -> column where every needed column exists, with the optional ones that exist."""
    if not all(has_column(kinds, column) for column in needed.values()):
        return None
    return {**needed, **{role: column for role, column in optional.items() if has_column(kinds, column)}}


def _first(kinds: Kinds, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in kinds), None)


def _match(needed: Mapping[str, str], optional: Mapping[str, str]) -> Callable[[Kinds, FileColumns], Roles | None]:
    """The roles' columns are those that flags name, otherwise the first that the file has of names split by blanks."""

    def match(kinds: Kinds, columns: FileColumns) -> Roles | None:
        def named(roles: Mapping[str, str]) -> Roles:
            return {
                role: getattr(columns, role, None) or _first(kinds, names.split()) or names.split()[0]
                for role, names in roles.items()
            }

        return _roles(kinds, named(needed), named(optional))

    return match


def _match_conversation(default: str) -> Callable[[Kinds, FileColumns], Roles | None]:
    """ShareGPT's and OpenAI's: a column of messages, and columns of a pair's responses that are single messages."""

    def match(kinds: Kinds, columns: FileColumns) -> Roles | None:
        optional = {"system": _first(kinds, _SYSTEM.split()) or "system"}
        for role, named in (("chosen", columns.chosen), ("rejected", columns.rejected)):
            if named or "an object" in kinds.get(role, ()):
                optional[role] = named or role
        return _roles(kinds, {"messages": columns.messages or default}, optional)

    return match


def _match_pair(kinds: Kinds, columns: FileColumns) -> Roles | None:
    """prompt, chosen and rejected; the prompt may be the beginning that both responses share."""
    if columns.prompt or has_column(kinds, "prompt"):
        return _match({"prompt": "prompt", "chosen": "chosen"}, {"rejected": "rejected"})(kinds, columns)
    if _first(kinds, ("instruction", "question", "query", "input", "conversations", "messages")):
        return None
    return _match({"chosen": "chosen", "rejected": "rejected"}, {})(kinds, columns)


def _match_completion(kinds: Kinds, columns: FileColumns) -> Roles | None:
    response = columns.chosen or _first(kinds, ("completion",) if "chosen" in kinds else ("completion", "response"))
    if response is None:
        return None
    return _roles(kinds, {"prompt": columns.prompt or "prompt", "chosen": response}, {})


_SYSTEM = "system system_prompt"
_TEXT = ("text", "a number")  # numbers are read as text
_KINDS_OF_JSON = (*_TEXT, "a list", "an object", "a truth value")  # the others are types of Arrow
_RESPONSE = (*_TEXT, "a list", "an object")
_TEXTS = {"chosen": _TEXT, "rejected": _TEXT}
_PAIR = {"prompt": ("text", "a list"), "chosen": _RESPONSE, "rejected": _RESPONSE}
_CONVERSATION = {"messages": ("a list", "text"), "chosen": _RESPONSE, "rejected": _RESPONSE}

_ALPACA = _match(
    {"prompt": "instruction", "chosen": "output response chosen"},
    {"input": "input context question", "rejected": "rejected", "system": _SYSTEM, "history": "history"},
)
_QUESTION = _match(
    {"prompt": "question query input", "chosen": "answer response output chosen"},
    {"rejected": "rejected", "instruction": "instruction", "system": _SYSTEM},
)
_RANKED = _match({"prompt": "prompt", "responses": "responses"}, {})

FORMATS: dict[str, _Kind] = {
    "preference": _Kind("prompt, chosen, rejected", _match_pair, read_pair, _PAIR),
    "prompt_completion": _Kind("prompt, completion", _match_completion, read_pair, _PAIR),
    "prompt_only": _Kind("prompt", _match({"prompt": "prompt"}, {}), read_pair, _PAIR),
    "messages": _Kind("messages", _match_conversation("messages"), read_conversation, _CONVERSATION),
    "sharegpt": _Kind("conversations", _match_conversation("conversations"), read_conversation, _CONVERSATION),
    "alpaca": _Kind("instruction, output", _ALPACA, read_instruction, {"history": ("a list",), **_TEXTS}),
    "question_answer": _Kind("question, answer", _QUESTION, read_instruction, _TEXTS),
    "ranked": _Kind("prompt, responses", _RANKED, read_ranked, {"responses": ("a list",)}),
    "text": _Kind("text", _match({"text": "text"}, {}), read_text),
}
# A column `prompt` belongs to these formats themselves; in a file of another format it is ambiguous.
_MAY_BE_MARKED = ("prompt_completion", "messages", "sharegpt", "alpaca", "question_answer")
_HOLD_A_PROMPT = ("preference", "prompt_completion", "messages", "sharegpt")


def check_format(name: str | None) -> None:
    """Raise ThreestepError where `--data_format` names no format."""
    if name is not None and name not in FORMATS:
        raise ThreestepError(
            f"--data_format expects one of {', '.join(FORMATS)}, got '{name}'{nearest_names(name, FORMATS)}"
        )


def recognise(kinds: Kinds, columns: FileColumns, data_format: str | None, where: str) -> Format:
    """The format of a file with these columns. `columns` and `data_format` come from flags.

    Raises ThreestepError, which begins with `where`, where no format or more than one fits, where flags contradict each
    other, and where a column holds values of a kind that the format does not take.
    """
    check_format(data_format)
    names = [data_format] if data_format else [] if columns.deciding else list(FORMATS)
    spelled = as_formats_spell(kinds, lambda known: any(FORMATS[name].match(known, columns) for name in names))
    known = {name: kinds[column] for name, column in spelled.items()}
    if data_format is not None:
        name, roles, why = data_format, FORMATS[data_format].match(known, columns), f"--data_format {data_format}"
        if roles is None:
            raise ThreestepError(_not_of_format(kinds, columns, name, where))
    elif columns.deciding:
        name, roles = _format_of_flags(kinds, columns, where)
        why = " and ".join(f"--{role}_column" for role in columns.deciding)
    else:
        name, roles = _only_fit(known, columns, where)
        why = "its columns"
    roles = _with_system(known, name, roles)
    read, label = FORMATS[name].read, columns.label or _first(known, MARK_COLUMNS)
    if name in _MAY_BE_MARKED and "rejected" not in roles and label and has_column(known, label):
        roles, read = {**roles, "label": label}, reader_of_marked(read)
    roles = {role: spelled.get(column, column) for role, column in roles.items()}
    _check_kinds(kinds, roles, {**FORMATS[name].allowed, "label": ("a truth value", "a number", "text")})
    check_numbers(kinds, roles.get("chosen", ""))
    return Format(name, roles, read, why)


def _not_of_format(kinds: Kinds, columns: FileColumns, name: str, where: str) -> str:
    begin = f"{where}: --data_format {name} expects the columns {FORMATS[name].needs}, but the columns are "
    for role in columns.deciding:
        column = getattr(columns, role)
        if not has_column(kinds, column):
            return (
                f"{begin}{column_names(kinds)}, without the '{column}' of --{role}_column"
                f"{nearest_column(column, kinds)}; name one of these"
            )
    return (
        f"{begin}{column_names(kinds)}; choose another format, or name its columns with flags such as --prompt_column"
    )


def _with_system(kinds: Kinds, name: str, roles: Roles) -> Roles:
    """The roles with a column of system messages, where the format has a place for them and the file such a column."""
    column = _first(kinds, _SYSTEM.split())
    has_place = "messages" in roles or "prompt" in roles or "a list" in kinds.get(roles.get("chosen", ""), ())
    if column is None or name in ("ranked", "text") or not has_place or set(kinds[column]) - {"text"}:
        return roles
    return {"system": column, **roles}


def _only_fit(kinds: Kinds, columns: FileColumns, where: str) -> tuple[str, Roles]:
    fits = {name: roles for name, kind in FORMATS.items() if (roles := kind.match(kinds, columns)) is not None}
    if len(fits) > 1 and not {"question", "answer"} <= kinds.keys():
        fits.pop("question_answer", None)  # by its other names it fits where nothing else does
    fits.pop("ranked", None)  # only a flag can say that a list of responses is ordered best first
    if fits.keys() & set(_HOLD_A_PROMPT):
        fits.pop("prompt_only", None)
    if "rejected" in fits.get("preference", {}) and "a list" in kinds["chosen"]:
        fits.pop("messages", None)  # UltraFeedback's: the chosen conversation once more
    if len(fits) == 1:
        return next(iter(fits.items()))
    begin = f"{where}: the columns {column_names(kinds)} fit "
    if fits:
        deciding = " or ".join(f"--data_format {name}" for name in fits)
        raise ThreestepError(f"{begin}{len(fits)} formats, {' and '.join(fits)}; decide with {deciding}")
    needs = {name: kind.needs for name, kind in FORMATS.items()}
    known = "; ".join(f"{columns} ({name})" for name, columns in needs.items())
    raise ThreestepError(
        f"{begin}no format{nearest_format(kinds, needs)}; expected the columns of one of these: {known}; or name your "
        "own columns: questions and answers with --data_format question_answer --prompt_column Q --chosen_column A, "
        "text to use as stored with --prompt_column, --chosen_column and --rejected_column, other data with "
        "--messages_column or --text_column, or your own class with --dataset_module"
    )


def _format_of_flags(kinds: Kinds, columns: FileColumns, where: str) -> tuple[str, Roles]:
    """The format that flags name, and its roles. A response's column may be missing: not every phase needs it (see
    `FileDataset.check_phase`)."""
    named = columns.deciding
    for role, (name, others) in _DECIDED_BY.items():
        if role not in named:
            continue
        if foreign := [other for other in named if other != role and other not in others]:
            raise ThreestepError(
                f"{where}: --{role}_column and --{foreign[0]}_column belong to different formats; remove one"
            )
        roles = FORMATS[name].match(kinds, columns)
        if roles is None:
            missing = role if not has_column(kinds, getattr(columns, role)) else others[0]
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


# Columns that decide on a format by themselves, the format, and the columns that may be named with them.
_DECIDED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "messages": ("messages", ("chosen", "rejected")),
    "responses": ("ranked", ("prompt",)),
    "text": ("text", ()),
}


def missing_column(kinds: Kinds, where: str, column: str, role: str) -> str:
    return (
        f"{where}: no column '{column}'; the columns are {column_names(kinds)}{nearest_column(column, kinds)}; name "
        f"the right one with --{role}_column"
    )


def _check_kinds(kinds: Kinds, roles: Roles, allowed: Mapping[str, tuple[str, ...]]) -> None:
    """Check that each column holds values that its role may hold, all of the first row's kind."""
    for role, column in roles.items():
        accepted = allowed.get(role, ("text",))
        first = next(iter(kinds.get(column, ())), None)
        if first in accepted:
            accepted = _TEXT if first in _TEXT and "a number" in accepted else (first,)
        for kind, where in kinds.get(column, {}).items():
            if kind not in accepted:
                remedy = '; write it as text, such as "true"' if kind == "a truth value" and role != "label" else ""
                remedy = remedy or ("" if kind in _KINDS_OF_JSON else "; write it as text")
                raise ThreestepError(
                    f"{where}: column '{column}': expected {' or '.join(accepted)}, got {kind}{remedy}"
                )
