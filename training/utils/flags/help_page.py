"""`--help` of a program, from the dataclasses that hold its flags: first what a first run needs, then the topics.

    --help          the flags that a first run needs, an example, and the names of the topics
    --help TOPIC    the flags of one topic; NAME, one flag
    --help all      every flag

Cheap: neither argparse nor a library is loaded for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.flags.flags import AUTO, OTHER, TAKES_AUTO, TOPIC, TOPICS, UNIT, VALUES, Range
from training.utils.plugins.registry import topics

HELP_FLAGS = ("-h", "--help")
ALL = "all"
_CONFIG = ("config", "--config FILE", "YAML file of settings, named like the flags; flags override it.")
_MOST_COLUMNS, _FEWEST_COLUMNS = 120, 80
_LEFT = 40  # columns of the flags
_TWO_COLUMNS = 100  # on a narrower page a flag has a line of its own
_SENTENCE_END = re.compile(r"(?<!app)\.\s+(?=[A-Z`])")
_STARTED = "python -m"
_LONGEST_CHOICES = 24  # characters of names to show in place of a unit


def requested_topic(argv: Sequence[str]) -> str | None:
    """Return what --help is asked for in `argv`, "" where nothing follows it; None if it is not there."""
    for place, word in enumerate(argv):
        flag, has_equals, value = word.partition("=")
        if flag in HELP_FLAGS:
            following = argv[place + 1] if place + 1 < len(argv) else ""
            return value if has_equals else "" if following.startswith("-") else following
    return None


def help_page(
    parts: Sequence[type], program: str, description: str, wanted: str = "", *, first_flags: Sequence[str] = (),
    shown: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """Return the page. parts: dataclasses of flags. program: as one types it. description: its first sentence comes
    first; an indented line in it is an example. wanted: a topic, a flag's name, "all" or "". first_flags: names, in the
    order of the first page; without any it has all flags. shown: defaults that are not the fields'. ThreestepError for
    an unknown topic."""
    by_topic, titles = _by_topic(parts, shown := shown or {}), {**TOPICS, **topics()}
    flags = {field.name: (topic, (flag, _text(field, shown))) for topic, field, flag in entries_of(parts)}
    if wanted not in ("", ALL, *by_topic, *flags):
        raise ThreestepError(
            f"--help expects {', '.join(by_topic)}, {ALL} or a flag's name, or nothing after it, got '{wanted}'"
            f"{nearest_names(wanted, [*by_topic, *flags])}"
        )
    lines = [f"usage: {program} [flags]", ""]
    if wanted in flags and wanted not in by_topic:
        by_topic, wanted = {(topic := flags[wanted][0]): [flags[wanted][1]]}, topic
    if wanted in by_topic:
        return _joined([*lines, *_section(titles[wanted], by_topic[wanted])])
    lines += [*as_typed(description, program), ""]
    if wanted == ALL or not first_flags:
        for topic, entries in by_topic.items():
            lines += [*_section(f"{titles[topic]} ({topic})", entries), ""]
        return _joined([*lines, *_section("Settings from a file", [_CONFIG[1:]])])
    known = {field.name: (flag, _text(field, shown, brief=True)) for _, field, flag in entries_of(parts)}
    known[_CONFIG[0]] = _CONFIG[1:]
    lines += [*_section("Flags for a first run", [known[name] for name in first_flags]), ""]
    lines.append(f"{program} --help {ALL} shows every flag; --help TOPIC shows the flags of one topic:")
    return _joined([*lines, *_wrapped(", ".join(by_topic), "  ")])


def entries_of(parts: Iterable[type]) -> list[tuple[str, dataclasses.Field, str]]:
    """Every flag: (topic, field, the flag with its value, as --help shows it)."""
    found: list[tuple[str, dataclasses.Field, str]] = []
    for part in parts:
        kinds = typing.get_type_hints(part)
        for field in dataclasses.fields(part):
            topic = str(field.metadata.get(TOPIC) or getattr(part, "topic", OTHER))
            found.append((topic, field, _flag_with_value(field, kinds[field.name])))
    return found


def _by_topic(parts: Sequence[type], shown: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Flags with their texts by topic, in the order of TOPICS, then those of plugins."""
    found: dict[str, list[tuple[str, str]]] = {topic: [] for topic in (*TOPICS, *topics())}
    for topic, field, flag in entries_of(parts):
        found[topic].append((flag, _text(field, shown)))
    return {topic: entries for topic, entries in found.items() if entries}


def _flag_with_value(field: dataclasses.Field, kind: Any) -> str:
    """E.g. `--max_seq_len TOKENS`, `--dtype fp32|bf16|fp16`, `--padded`, `--stop TEXT ...`."""
    flag, values, unit = f"--{field.name}", field.metadata.get(VALUES), field.metadata.get(UNIT)
    kinds = [each for each in (*typing.get_args(kind), kind) if each is not type(None)]
    or_auto = f"|{AUTO}" if field.metadata.get(TAKES_AUTO) else ""
    if bool in kinds:
        return f"{flag} true|false{or_auto}"
    names = "|".join(map(str, values)) if values and not isinstance(values, Range) else ""
    shown = names if 0 < len(names) <= _LONGEST_CHOICES else (unit or "name").upper()
    if field.metadata.get("nargs") == "?":
        return f"{flag} [{shown}]"
    is_list = typing.get_origin(kind) is list
    return f"{flag} {shown} ..." if is_list else f"{flag} {shown}{or_auto}"


def _text(field: dataclasses.Field, shown: Mapping[str, Any], brief: bool = False) -> str:
    """The description, or its first sentence, and the default if there is one."""
    text, default = field.metadata.get("help", ""), shown.get(field.name, field.default)
    if brief:
        text = _SENTENCE_END.split(text, maxsplit=1)[0]
        text += "" if text.endswith(".") else "."
    if default is None and field.metadata.get(TAKES_AUTO):
        word = AUTO
    elif isinstance(default, bool):
        word = str(default).lower()
    elif isinstance(default, float):
        word = f"{default:g}"
    elif default in (None, "", dataclasses.MISSING):
        return text
    else:
        word = str(default)
    return f"{text} [{word}]"


def as_typed(description: str, program: str) -> list[str]:
    """The lines of a description, with `program` for `python -m MODULE` in its examples: the lines that are indented or
    start with `python -m`."""
    found = []
    for line in (line.rstrip() for line in inspect.cleandoc(description).splitlines()):
        start = "" if line.startswith(" ") else "  " if line.startswith(_STARTED) else None
        found.append(line if start is None else start + re.sub(rf"{_STARTED} [\w.]+", program, line, count=1))
    return found


def _section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"{title}:"]
    left = _LEFT if _columns() >= _TWO_COLUMNS else 6
    for flag, text in entries:
        wrapped = _wrapped(text, " " * left)
        if len(flag) + 4 <= left and wrapped:
            wrapped[0] = f"  {flag:<{left - 2}}{wrapped[0].lstrip()}"
        else:
            wrapped.insert(0, f"  {flag}")
        lines += wrapped
    return lines


def _columns() -> int:
    return max(_FEWEST_COLUMNS, min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _columns(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"
