"""Reads the documentation: what a Markdown page holds, and which programs its shell blocks would call.

Knows nothing of what a program's flags mean: tests/support/command_lines.py asks the programs themselves.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What was run on a day stays as it was run: these are checked for links, and not for commands and names.
HISTORY = (
    "CHANGELOG.md",
    "docs/lab_book.md",
    *sorted(f"docs/lab_book/{path.name}" for path in (ROOT / "docs/lab_book").glob("*.md")),
)

_FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n)\n((?: {4}.*\n)+)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(r"^(?:\w+=\S* )*(?:python|bash|torchrun|deepspeed|accelerate|make|srun|sbatch) ", re.MULTILINE)

# A word that no program answers to is noted with all that follows it; so are the builtins that would leave the block.
_RECORDER = """
command_not_found_handle() { printf '%s\\0' "$#" "$@" >>"$CALLS"; }
for name in cd source . exec kill wait ulimit; do
    eval "$name() { command_not_found_handle $name \\"\\$@\\"; }"
done
set -eu
"""


class Block(NamedTuple):
    """A code block: its language ("" where none is given), the word after it, its text, its line in the page."""

    language: str
    label: str
    content: str
    line: int


def all_pages() -> list[Path]:
    """Every page of the documentation, a new one included."""
    patterns = ("*.md", "docs/**/*.md", "training/**/*.md", "threestep/**/*.md", "examples/**/*.md", "scripts/**/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The code blocks of a page; an indented one, or one without a language, is bash where it holds commands."""
    found = []
    for match in _FENCE.finditer(text):
        language, label, content = match[1], match[2] or "", match[3]
        found.append(Block(language, label, content, text.count("\n", 0, match.start()) + 1))
    without = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INDENTED.finditer(without):
        found.append(Block("", "", textwrap.dedent(match[1]), without.count("\n", 0, match.start(1)) + 1))
    return [block._replace(language="bash") if _holds_commands(block) else block for block in found]


def _holds_commands(block: Block) -> bool:
    return block.language in ("", "sh", "shell") and all(
        _COMMAND.match(line) for line in re.sub(r"\\\n", "", block.content).splitlines() if line.strip()
    )


def calls(content: str, folder: Path) -> list[list[str]]:
    """Every program that bash would start for a block, as its words; none is started.

    bash itself reads the block, with no program in reach: quotes, variables, loops and lines that go on mean what they
    mean. Files that the block writes land in `folder`. Raises ValueError with bash's words where it cannot be read.
    """
    noted = folder / "calls"
    noted.write_text("")
    environment = {"PATH": "/nonexistent", "CALLS": str(noted), "HOME": str(folder)}
    done = subprocess.run(
        ["/bin/bash", "-c", _RECORDER + content], env=environment, cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    if done.returncode != 0 or done.stderr:
        raise ValueError(f"bash ends with {done.returncode}: {done.stderr.strip()}")
    words = noted.read_text().split("\0")[:-1]
    found = []
    while words:
        count = int(words.pop(0))
        found.append(words[:count])
        words = words[count:]
    return found


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures, without those in code."""
    return [match[1] or match[2] for match in _LINK.finditer(_CODE.sub("", _FENCE.sub("", text)))]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found: set[str] = set()
    for match in _HEADING.finditer(_FENCE.sub("", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1])
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name if number == 0 else f"{name}-{number}") in found:
            number += 1
        found.add(name if number == 0 else f"{name}-{number}")
    return found


def code_spans(text: str) -> list[str]:
    """What stands in backticks in a page's text."""
    return _CODE.findall(_FENCE.sub("", text))
