"""The steps' tables of DeepSpeed-Chat's flags, as threestep/plugins/names/deepspeed_chat_flags.md shows them.

python -m tests.support.deepspeed_chat_table
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

from tests.support.deepspeed_chat_lines import EVALUATION_LINES, LINES
from threestep.plugins.names.deepspeed_chat_flags import ANSWERING_OLD_FLAGS, SCORING_OLD_FLAGS
from threestep.plugins.names.other_names import DEEPSPEED_CHAT, Needless, OldFlag, Refused, Renamed, Same
from training.utils.flags.step import known_steps


def as_markdown() -> str:
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
                switch = f"not needed: {old.otherwise}; with a file, refused" if "" in old.unless else "refused"
                lines.append(f"| `{flag}` | {switch}: {old.why} |")
        lines.append("")
    return "\n".join(lines).replace("<|", "<\\|").replace("|>", "\\|>")


def scripts_as_markdown() -> str:
    """Return one row for each of DeepSpeed-Chat's shell scripts, in Markdown: the command lines that it runs, and how
    many of their flags keep their names, are read as others, and are not needed here."""
    steps = {"sft": "step1_sft", "reward": "step2_reward", "dpo": "step2_dpo", "ppo": "step3_ppo"}
    lines = [
        "| script | runs behind | command lines | flags | same name | read as another | not needed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_script: dict[tuple[str, str], list[str]] = {}
    for line in LINES:
        by_script.setdefault((line.step, line.name), []).append(line.flags)
    for (step, name), flags in by_script.items():
        found = {word for line in flags for word in line.split() if word.startswith("--")}
        kinds = Counter(_kind(flag, known_steps()[steps[step]].old_flags) for flag in found)
        counts = " | ".join(str(kinds[kind]) for kind in (Same, Renamed, Needless))
        file = name.replace("sweep", "sweep/run_single")
        lines.append(f"| {step} {file}.sh | threestep {step} | {len(flags)} | {len(found)} | {counts} |")
    for name, (program, typed) in EVALUATION_LINES.items():
        tables = ANSWERING_OLD_FLAGS if "win_rate" in program else SCORING_OLD_FLAGS
        kinds = Counter(_kind(word, tables) for word in typed.split() if word.startswith("--"))
        counts = " | ".join(str(kinds[kind]) for kind in (Same, Renamed, Needless))
        lines.append(f"| {name}.sh | {program} | 1 | {kinds.total()} | {counts} |")
    return "\n".join([*lines, ""])


def _kind(flag: str, old_flags: Mapping[str, OldFlag]) -> type:
    """Same, for a flag of ours, or the kind of its entry; --deepspeed, a switch here, is not needed."""
    return Needless if flag == "--deepspeed" else type(old_flags.get(flag, Same()))


if __name__ == "__main__":
    sys.stdout.write("\n".join([scripts_as_markdown(), as_markdown()]))
