"""Docstrings as Sphinx reads them: ours are plain text with `code` in backticks, not reStructuredText.

Paragraphs stay paragraphs. Lines that name something (`name: what it is`) keep their line breaks, and what is indented
is shown as it stands.
"""

from __future__ import annotations

import re
from typing import Any

_NAMED = re.compile(r"^(- )?[\w`*./()\[\]<> -]{1,40}(, [\w`*]+)*: ")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's hook `autodoc-process-docstring`: changes `lines` in place."""
    lines[:] = as_restructured(lines)


def as_restructured(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText that shows what they say."""
    found: list[str] = []
    for block in _blocks(lines):
        if all(line.startswith(" ") for line in block):
            found += ["::", "", *(f"    {line}" for line in block)]
        elif any(_NAMED.match(line) or line.startswith("- ") for line in block):
            found += [f"| {escaped(line.strip())}" for line in block]
        else:
            found += [escaped(line.strip()) for line in block]
        found.append("")
    return found


def escaped(text: str) -> str:
    """Return a line in which only `code` is markup."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a code span that goes on in the next line, or a lone backtick
        return re.sub(r"([\\*_|`])", r"\\\1", text)
    return "".join(
        (f"``{part}``" if part.strip() == part and part else part)
        if index % 2
        else _spaced(re.sub(r"([\\*_|])", r"\\\1", part), index, len(parts))
        for index, part in enumerate(parts)
    )


def _spaced(text: str, index: int, count: int) -> str:
    """A literal ends only before a blank or a mark: `code`s needs an empty escape between."""
    start = "\\ " if index and text[:1].isalnum() else ""
    end = "\\ " if index < count - 1 and text[-1:].isalnum() else ""
    return f"{start}{text}{end}"


def _blocks(lines: list[str]) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            # an indented part below a line is a block of its own, and so is what follows it
            if blocks[-1] and line.startswith("    ") != blocks[-1][-1].startswith("    "):
                blocks.append([])
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]
