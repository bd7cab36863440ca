"""The tables of Hugging Face's and TRL's flags, fields and command lines, for threestep/plugins/names/trl_flags.md.

python -m tests.support.trl_table
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.trl_lines import LINES, STATUSES, STEPS, sentence_of, statuses
from threestep.plugins.names.other_names import HUGGING_FACE, Needless, OldFlag, Refused, Renamed
from training.utils.flags.step import known_steps

_HEAD = ("| flag | here | meaning |", "| --- | --- | --- |")


def as_markdown() -> str:
    """Return the tables in Markdown: flags that every step reads alike, that the steps with one model do, and a
    step's own."""
    left = {step.name: _rows(step.old_flags) for step in known_steps().values()}
    one_model = [name for name, step in known_steps().items() if "model_name_or_path" in step.inputs]
    lines: list[str] = []
    for title, names in (("Every step", list(left)), ("SFT, reward model and DPO", one_model)):
        rows = [row for row in left[names[0]] if all(row in left[name] for name in names)]
        lines += [f"### {title}", "", *_HEAD, *rows, ""]
        for name in names:
            left[name] = [row for row in left[name] if row not in rows]
    for name, rows in left.items():
        step = known_steps()[name]
        lines += [f"### Step {step.number}, {step.label}", "", *_HEAD, *rows, ""]
    return "\n".join(lines).replace("<|", "<\\|").replace("|>", "\\|>")


def fields_as_markdown() -> str:
    """Return, by trainer of TRL, how many of its fields are what, in Markdown."""
    lines = [f"| trainer | fields | {' | '.join(STATUSES)} |", f"| --- | --- |{' --- |' * len(STATUSES)}"]
    for trainer in STEPS:
        found = Counter(statuses(trainer).values())
        lines.append(f"| {trainer} | {found.total()} | {' | '.join(str(found[status]) for status in STATUSES)} |")
    return "\n".join([*lines, ""])


def lines_as_markdown() -> str:
    """Return, by trainer of TRL, how many of its documented command lines and files are read, and the others with the
    reason, in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        sentences = {line: sentence_of(line, Path(folder)) for line in LINES}
    lines = ["| trainer | command lines and files | read | refused |", "| --- | --- | --- | --- |"]
    for trainer in STEPS:
        found = [sentence for line, sentence in sentences.items() if line.trainer == trainer]
        lines.append(f"| {trainer} | {len(found)} | {found.count('')} | {len(found) - found.count('')} |")
    lines += ["", "| page | command line | why it is refused |", "| --- | --- | --- |"]
    for line, sentence in sentences.items():
        if sentence:
            lines.append(f"| {line.page} | `{line.trainer} {' '.join(line.line.split()[:6])} ...` | {sentence} |")
    return "\n".join([*lines, ""])


def _rows(flags: Mapping[str, OldFlag]) -> list[str]:
    rows = []
    for flag, read in sorted(flags.items()):
        if HUGGING_FACE in read.whose:
            here, meaning = _cells(flag, read)
            rows.append(f"| `{flag}` | {here} | {meaning} |")
    return rows


def _cells(flag: str, read: OldFlag) -> tuple[str, str]:
    if isinstance(read, Needless):
        return "not needed", read.why
    if isinstance(read, Refused):
        return "refused", f"{flag} {read.why}"
    meaning = f"another: {read.differs}" if read.differs else "the same"
    if isinstance(read, Renamed):
        return f"read as `{read.now}`", "; ".join(part for part in (meaning, read.note) if part)
    return "ours", "; ".join(part for part in (meaning, read.note) if part)


if __name__ == "__main__":
    sys.stdout.write("\n".join([fields_as_markdown(), lines_as_markdown(), as_markdown()]))
