"""The tables of Hugging Face's and TRL's flags, as docs/from_trl.md shows them.

python -m tests.support.trl_table
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from training.utils.compat.old_flags import HUGGING_FACE, Needless, OldFlag, Refused, Renamed
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
    sys.stdout.write(as_markdown())
