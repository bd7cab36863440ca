"""JSON lines and JSON lists as sequences of rows; they remember where each row begins, and parse it when it is read.

Arrow, and so `datasets`, pads objects with nulls: each object of a column gets the keys of all others. The keys show
whether a JSON file was written from Arrow: all objects at one place, such as a call's arguments, then have the same
keys in the same order. Where the keys differ, the objects are not padded, and a null is a value.
"""

from __future__ import annotations

import io
import json
import re
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected, FileRow, Kinds, check_row, column_names, note_kinds
from training.utils.data.files.content import (
    UTF_8,
    check_kind,
    encoding_of,
    mapped,
    open_local,
    open_stream,
    python_hint,
    start_of,
)

_BLANKS = re.compile(r"[ \t\r\n]*")
_MOST_BYTES = 1 << 20  # of an object over several lines
_ONE_CONVERSATION = {"messages", "conversations"}  # a list of messages, not of rows
_MOST_PLACES = 100_000  # a file whose keys are names of things, such as ids, has places without end
_KEYS_SHOWN = 5
_Place = tuple[str | None, ...]
_UNREADABLE = (ValueError, RecursionError)  # JSON with a number of thousands of digits, or nested too deeply


class _JsonRows(Sequence):
    """The rows of a file, each parsed when it is read, without the nulls of `Padding`.

    kinds: of all columns. nulls: how many are left out, by key.
    """

    def __init__(self, path: str, expected: Expected | None) -> None:
        self.path = path
        self.kinds: Kinds = {}
        self._expected = expected
        self._padding = Padding()
        self._begins, self._lines = array("q"), array("q")
        self._forms: set[tuple[Any, ...]] = set()  # names and types of the columns of rows

    def _note(self, row: Any, begin: int, line_number: int, *, may_be_padded: bool) -> None:
        where = f"{self.path}, line {line_number}"
        check_row(row, where, self._expected)
        if may_be_padded:
            self._padding.note(row)
        if (form := (*row, *map(type, row.values()))) not in self._forms:
            self._forms.add(form)
            note_kinds(self.kinds, row, where)
        self._begins.append(begin)
        self._lines.append(line_number)

    def _parsed(self, begin: int, where: str) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        where = f"{self.path}, line {self._lines[int(index)]}"
        return FileRow(self._padding.without(self._parsed(self._begins[int(index)], where)), where)

    @property
    def nulls(self) -> Counter[str]:
        return self._padding.nulls


class JsonLines(_JsonRows):
    """The objects of a JSON-lines file.

    The constructor reads the whole file once. It raises ThreestepError at the first row that is not an object or not as
    `expected`. Blank lines are skipped. Threads and forked processes may share one.
    """

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        super().__init__(path, expected)
        with open_local(path, spool_dir, text=True) as file:
            self._content = mapped(file)
        may_be_padded = self._content.find(b"null") >= 0
        self._line_end = b"\n" if self._content.find(b"\n") >= 0 else b"\r"  # of old Macintosh programs
        begin, line_number = 0, 0
        while begin < len(self._content):
            line_number += 1
            line = self._line(begin)
            if line.strip():
                where = f"{path}, line {line_number}"
                self._check_one_line(begin, line, where)
                self._note(_parse(line, where), begin, line_number, may_be_padded=may_be_padded)
            begin += len(line)

    def _line(self, begin: int) -> bytes:
        end = self._content.find(self._line_end, begin)
        return self._content[begin:] if end < 0 else self._content[begin : end + 1]

    def _check_one_line(self, begin: int, line: bytes, where: str) -> None:
        """Raise ThreestepError where an object begins that ends on a later line."""
        if line.rstrip().endswith(b"}"):
            return
        text = self._content[begin : begin + _MOST_BYTES].decode(errors="replace")
        try:
            value, end = json.JSONDecoder().raw_decode(text, _after_blanks(text, 0))
        except _UNREADABLE:
            return
        if isinstance(value, (dict, list)) and end > len(line.decode(errors="replace")):
            raise ThreestepError(
                f"{where}: expected one JSON object per line, got one that spans several lines; write each row "
                f"on its own line, as jq -c . {self.path} does"
            )

    def _parsed(self, begin: int, where: str) -> Any:
        return _parse(self._line(begin), where)


class JsonList(_JsonRows):
    """The objects of a file with one JSON list (or an object that holds one), checked as in `JsonLines`; the text of
    the file stays in memory."""

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        super().__init__(path, expected)
        self._text = _text_of(path)
        may_be_padded = "null" in self._text
        for row, begin, line_number in _items(self._text, path):
            self._note(row, begin, line_number, may_be_padded=may_be_padded)

    def _parsed(self, begin: int, where: str) -> Any:
        return json.JSONDecoder().raw_decode(self._text, begin)[0]


def read_jsonl(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> JsonLines | JsonList:
    """A file of JSON lines; one with one JSON list, or an object over several lines that holds one, is read as such."""
    first = _first_line(path)
    reads_list = first.startswith("[") or (first.startswith("{") and not _is_json(first) and _holds_list(path))
    return (JsonList if reads_list else JsonLines)(path, expected, spool_dir)


def read_json(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> JsonLines | JsonList:
    """A file with one JSON list, or an object that holds one (`{"data": [...]}`); JSON lines are read as such."""
    reads_list = not _first_line(path).startswith("{") or _is_json(_text_of(path))
    return (JsonList if reads_list else JsonLines)(path, expected, spool_dir)


def _first_line(path: str) -> str:
    """The first line that is not blank, without blanks around it."""
    with open_stream(path) as file:
        start = start_of(file)
        check_kind(start, path, "text")
        lines = io.TextIOWrapper(file, encoding_of(start), errors="replace")
        return next((line.strip() for line in lines if line.strip()), "")


def _holds_list(path: str) -> bool:
    """True for one object that holds one list of rows."""
    text = _text_of(path)
    if not _is_json(text):
        return False
    try:
        _list_begins(text, path)
    except ThreestepError:
        return False
    return True


def _text_of(path: str) -> str:
    with open_stream(path) as file:
        encoding = encoding_of(start_of(file))
        return _decode(file.read(), path, encoding)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except _UNREADABLE:
        return False
    return True


def _decode(content: bytes, where: str, encoding: str = UTF_8) -> str:
    try:
        # the codec utf-8-sig is slow
        return content.removeprefix(BOM_UTF8).decode() if encoding == UTF_8 else content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ThreestepError(
            f"{where}: expected UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error


def _parse(line: bytes, where: str) -> Any:
    text = _decode(line, where)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise ThreestepError(
                f"{where}: expected one JSON object per line, got more text at column {error.colno}: "
                f"{text[error.pos :].strip()[:40]!r}; remove it, or write it on its own line"
            ) from error
        raise ThreestepError(
            f"{where}: expected one JSON object, got text that is not JSON ({error.msg} at column {error.colno}): "
            f"{text.strip()[:60]!r}{python_hint(text)}"
        ) from error
    except _UNREADABLE as error:
        raise ThreestepError(f"{where}: expected one JSON object, got one that cannot be read: {error}") from error
    _check_characters(value, text, where)
    return value


def _check_characters(value: Any, text: str, where: str) -> None:
    r"""JSON may hold half of a pair such as \ud83d\ude00; such a text can be neither stored nor tokenized."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ThreestepError(
                f"{where}: expected text, got \\u{ord(error.object[error.start]):x}, half of a surrogate pair; write "
                "both halves, or the character itself"
            ) from error


def _after_blanks(text: str, position: int) -> int:
    return position + len(_BLANKS.match(text, position)[0])  # type: ignore[index]


def _list_begins(text: str, path: str) -> int:
    """Position of the list of rows: at the file's beginning, or the only list in the object that the file holds."""
    position = _after_blanks(text, 0)
    if text[position : position + 1] == "[":
        return position
    decoder = json.JSONDecoder()
    lists: dict[str, int] = {}
    try:
        whole = decoder.raw_decode(text, position)[0] if text[position : position + 1] == "{" else None
        while isinstance(whole, dict) and text[position] not in "}" and len(whole):
            key, end = decoder.raw_decode(text, _after_blanks(text, position + 1))
            position = _after_blanks(text, _after_blanks(text, end) + 1)
            lists |= {key: position} if text[position] == "[" else {}
            position = _after_blanks(text, decoder.raw_decode(text, position)[1])
    except _UNREADABLE:
        whole = None
    if len(lists) == 1 and not lists.keys() & _ONE_CONVERSATION:
        return next(iter(lists.values()))
    if not text.strip():
        raise ThreestepError(f"{path} is empty: expected a JSON list of objects, or one object per line")
    got = f"one object with {column_names(whole)}" if isinstance(whole, dict) else repr(text[position : position + 40])
    if (
        isinstance(whole, dict)
        and len(whole) > 1
        and all(isinstance(column, (list, dict)) for column in whole.values())
    ):
        raise ThreestepError(
            f"{path}, line 1: expected one JSON list of objects, got a table of columns ({column_names(whole)}); "
            "write it row by row, in pandas with to_json(path, orient='records', lines=True)"
        )
    raise ThreestepError(
        f"{path}, line 1: expected one JSON list of objects, got {got}; write the rows as a list, as "
        f'{{"data": [...]}}, or as one object per line and use jsonl:{path}'
    )


def _items(text: str, path: str) -> Iterator[tuple[Any, int, int]]:
    """Each item of a JSON list, the index in the text where it begins, and its line number."""
    decoder = json.JSONDecoder()
    begin = _list_begins(text, path)
    position = _after_blanks(text, begin + 1)
    line_number, counted = 1, 0
    while text[position : position + 1] != "]":
        line_number += text.count("\n", counted, position)
        counted = position
        try:
            item, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ThreestepError(
                f"{path}, line {error.lineno}: expected a JSON object, got text that is not JSON ({error.msg})"
            ) from error
        except _UNREADABLE as error:
            raise ThreestepError(
                f"{path}, line {line_number}: expected a JSON object, got one that cannot be read: {error}"
            ) from error
        _check_characters(item, text[position:end], f"{path}, line {line_number}")
        yield item, position, line_number
        position = _after_blanks(text, end)
        if text[position : position + 1] == ",":
            position = _after_blanks(text, position + 1)
        elif text[position : position + 1] != "]":
            at_line = 1 + text.count("\n", 0, position)
            raise ThreestepError(f"{path}, line {at_line}: the JSON list is cut off or lacks a comma here")
    rest = _after_blanks(text, position + 1)
    if text[_after_blanks(text, 0)] == "[" and rest < len(text):
        at_line = 1 + text.count("\n", 0, rest)
        raise ThreestepError(
            f"{path}, line {at_line}: expected nothing after the JSON list, got {text[rest : rest + 40]!r}; a file "
            "holds one list of objects, or one object per line"
        )


# Nulls that pad objects.


class Padding:
    """The keys of the objects at each place below the columns of a file, and the nulls among their values. A place is
    a path of keys, with None for the items of a list."""

    def __init__(self) -> None:
        self._keys: dict[_Place, tuple[str, ...] | None] = {}  # None where they differ
        self._nulls: dict[tuple[_Place, str], int] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """Take a row into account."""
        for column, value in row.items():
            self._note(value, (column,))

    def _note(self, value: Any, place: _Place) -> None:
        if isinstance(value, list):
            inside = (*place, None)
            for item in value:
                if isinstance(item, (dict, list)):
                    self._note(item, inside)
        elif isinstance(value, dict) and len(self._keys) <= _MOST_PLACES:
            keys = tuple(value)
            if self._keys.setdefault(place, keys) != keys:
                self._keys[place] = None
            for key, inner in value.items():
                if inner is None:
                    self._nulls[place, key] = self._nulls.get((place, key), 0) + 1
                elif isinstance(inner, (dict, list)):
                    self._note(inner, (*place, key))

    @property
    def nulls(self) -> Counter[str]:
        """The number of nulls that are padding, by key."""
        padded = (Counter({key: count}) for (place, key), count in self._nulls.items() if self._pads(place))
        return sum(padded, Counter[str]())

    def _pads(self, place: _Place) -> bool:
        return len(self._keys) <= _MOST_PLACES and self._keys.get(place) is not None

    def without(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row without the nulls that are padding; those of columns stay."""
        return {column: self._without(value, (column,)) for column, value in row.items()} if self._nulls else dict(row)

    def _without(self, value: Any, place: _Place) -> Any:
        if isinstance(value, list):
            inside = (*place, None)
            return [self._without(item, inside) if isinstance(item, (dict, list)) else item for item in value]
        if isinstance(value, dict):
            pads = self._pads(place)
            return {
                key: self._without(inner, (*place, key)) if isinstance(inner, (dict, list)) else inner
                for key, inner in value.items()
                if inner is not None or not pads
            }
        return value


def nulls_sentence(found: Counter[str]) -> str | None:
    """A sentence on nulls that are left out as padding; None if there are none."""
    if not found:
        return None
    keys = ", ".join(f"{count:,} '{key}'" for key, count in found.most_common(_KEYS_SHOWN))
    more = ", ..." if len(found) > _KEYS_SHOWN else ""
    return (
        f"nulls are read as missing keys if all objects have the same keys, as `datasets` pads them: {keys}{more}; to "
        "keep a null in a tool call's arguments, write the arguments as JSON text"
    )
