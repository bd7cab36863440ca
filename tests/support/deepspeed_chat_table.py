"""The steps' tables of DeepSpeed-Chat's flags, as docs/from_deepspeed_chat.md shows them.

python -m tests.support.deepspeed_chat_table
"""

from __future__ import annotations

import sys

from training.utils.compat.old_flags import DEEPSPEED_CHAT, Needless, Refused, Renamed
from training.utils.flags.step import known_steps


def as_markdown() -> str:
    """Return the tables, one a step, in Markdown."""
    lines: list[str] = []
    for step in known_steps().values():
        lines += [f"### Step {step.number}, {step.label}", "", "| flag | here |", "| --- | --- |"]
        for flag, old in sorted(step.old_flags.items()):
            if DEEPSPEED_CHAT not in old.whose:
                continue
            if isinstance(old, Needless):
                lines.append(f"| `{flag}` | not needed: {old.why} |")
            elif isinstance(old, Renamed):
                given = old.words("", {}) if old.words and not old.takes_value and not old.note else [old.now]
                lines.append(f"| `{flag}` | read as `{' '.join(given)}`" + (f": {old.note} |" if old.note else " |"))
            elif isinstance(old, Refused):
                lines.append(f"| `{flag}` | refused: {old.why} |")
        lines.append("")
    return "\n".join(lines).replace("<|", "<\\|").replace("|>", "\\|>")


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
