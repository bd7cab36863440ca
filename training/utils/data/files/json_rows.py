"""JSON lines and JSON lists as sequences of rows; they remember where each row begins, and parse it when it is read."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from training.utils.data.files.addresses import mapped, open_local, open_stream
from training.utils.data.files.columns import Expected, FileRow, Kinds, check_row, note_kinds
from training.utils.run.errors import ThreestepError

_BLANKS = re.compile(r"[ \t\r\n]*")
_UNREADABLE = (ValueError, RecursionError)  # JSON with a number of thousands of digits, or nested too deeply


class JsonLines(Sequence):
    """The objects of a JSON-lines file, each parsed when it is read.

    The constructor reads the whole file once and notes the `kinds` of all columns. It raises ThreestepError at the
    first row that is not an object or not as `expected`. Blank lines are skipped. Threads and forked processes may
    share one.
    """

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        self.path = path
        self.kinds: Kinds = {}
        self._begins, self._lines = array("q"), array("q")
        with open_local(path, spool_dir) as file:
            self._content = mapped(file)
        begin, line_number = 0, 0
        while begin < len(self._content):
            line_number += 1
            line = self._line(begin)
            if line.strip():
                where = f"{path}, line {line_number}"
                row = _parse(line, where)
                check_row(row, where, expected)
                note_kinds(self.kinds, row, where)
                self._begins.append(begin)
                self._lines.append(line_number)
            begin += len(line)

    def _line(self, begin: int) -> bytes:
        end = self._content.find(b"\n", begin)
        return self._content[begin:] if end < 0 else self._content[begin : end + 1]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        where = f"{self.path}, line {self._lines[int(index)]}"
        return FileRow(_parse(self._line(self._begins[int(index)]), where), where)


class JsonList(Sequence):
    """The objects of a file with one JSON list, checked as in `JsonLines`; the text of the file stays in memory."""

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        self.path = path
        self.kinds: Kinds = {}
        self._begins, self._lines = array("q"), array("q")
        with open_stream(path) as file:
            self._text = _decode(file.read(), path)
        for row, begin, line_number in _items(self._text, path):
            where = f"{path}, line {line_number}"
            check_row(row, where, expected)
            note_kinds(self.kinds, row, where)
            self._begins.append(begin)
            self._lines.append(line_number)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        values, _ = json.JSONDecoder().raw_decode(self._text, self._begins[int(index)])
        return FileRow(values, f"{self.path}, line {self._lines[int(index)]}")


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ThreestepError(f"{where}: expected UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(line: bytes, where: str) -> Any:
    text = _decode(line, where)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ThreestepError(
            f"{where}: expected one JSON object, got text that is not JSON ({error.msg} at column {error.colno}): "
            f"{text.strip()[:60]!r}"
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
                f"{where}: expected text, got \\u{ord(error.object[error.start]):x}, half of a pair that stands for "
                "one character; write both halves, or the character itself"
            ) from error


def _after_blanks(text: str, position: int) -> int:
    return position + len(_BLANKS.match(text, position)[0])  # type: ignore[index]


def _items(text: str, path: str) -> Iterator[tuple[Any, int, int]]:
    """Each item of a JSON list, the index in the text where it begins, and its line number."""
    decoder = json.JSONDecoder()
    position = _after_blanks(text, 0)
    if text[position : position + 1] != "[":
        raise ThreestepError(
            f"{path}, line 1: expected one JSON list of objects, got {text[position : position + 40]!r}; "
            f"for one object per line use jsonl:{path}"
        )
    position = _after_blanks(text, position + 1)
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
            raise ThreestepError(f"{path}, line {at_line}: the JSON list breaks off or lacks a comma here")
