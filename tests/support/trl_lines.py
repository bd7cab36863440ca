"""TRL 1.16's own command lines and the names of its fields, as data: facts of its documentation and its parser.

trl_lines.json: each command line with the page that prints it. `file` in the page's name: a file of settings in the
place of flags. (Pages are of the last version whose sources are public, scripts of 1.16 itself.)
trl_fields.json: by trainer, every flag of TRL's parser, with a word that it takes; "" for a switch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from threestep.command import commands
from threestep.plugins.names.other_names import Needless, Refused, translated
from training.utils.base.console import RANKS_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.step import Step, known_steps
from training.utils.run.launch import as_variables

_PLACE = Path(__file__).parent
STEPS = {
    "sft": "step1_sft",
    "reward": "step2_reward",
    "dpo": "step2_dpo",
    "grpo": "step3_ppo",
    "rloo": "step3_ppo",
}
WORKS, NOT_NEEDED, REFUSED, UNKNOWN = STATUSES = ("works", "not needed", "refused", "unknown")


@dataclass(frozen=True)
class TrlLine:
    """page: that prints it. trainer: the word behind `trl`. line: what stands behind that, or a file's text."""

    page: str
    trainer: str
    line: str

    @property
    def is_file(self) -> bool:
        return self.page.endswith(", file")

    def words(self, file: Path) -> list[str]:
        """Behind `threestep`. file: where the text of a file of settings is written."""
        if not self.is_file:
            return [self.trainer, *shlex.split(self.line)]
        file.write_text(self.line + "\n", encoding="utf-8")
        return [self.trainer, "--config", str(file)]


LINES = tuple(TrlLine(**each) for each in json.loads((_PLACE / "trl_lines.json").read_text(encoding="utf-8")))


def fields_of(trainer: str) -> dict[str, str]:
    """Every flag of a trainer, with a word that it takes."""
    tables = json.loads((_PLACE / "trl_fields.json").read_text(encoding="utf-8"))
    return {f"--{name}": word for name, word in sorted({**tables["every"], **tables[trainer]}.items())}


def status_of(flag: str, word: str, step: Step) -> str:
    """What becomes of a flag, read as a command line's: one of STATUSES."""
    ours = {f"--{name}" for name in step.defaults} | {"--config", "--local_rank"}
    old = step.old_flags.get(flag)
    if isinstance(old, Refused):
        return REFUSED
    if isinstance(old, Needless):
        return NOT_NEEDED
    try:
        words, lines = translated([flag, *([word] if word else [])], step.old_flags)
    except ThreestepError as problem:  # of a flag that is read, the value alone; of a negation, that it is off
        return WORKS if old else REFUSED if str(problem).startswith(flag) else UNKNOWN
    if old is None and any(" is not needed: " in line for line in lines):
        return NOT_NEEDED
    names = {name.partition("=")[0] for name in words if name.startswith("--")}
    return WORKS if old or lines or names <= ours else UNKNOWN


def statuses(trainer: str) -> dict[str, str]:
    step = known_steps()[STEPS[trainer]]
    return {flag: status_of(flag, word, step) for flag, word in fields_of(trainer).items()}


def sentence_of(line: TrlLine, folder: Path) -> str:
    """Why a command line is not read behind `threestep`; "" if it is. A tracker's package need not be installed."""
    word, *arguments = line.words(folder / "settings.yaml")
    step, before = known_steps()[STEPS[line.trainer]], os.environ.get("WORLD_SIZE")
    rest, variables, _ = as_variables([*commands()[word].flags, *arguments], {})
    try:
        os.environ["WORLD_SIZE"] = variables.get(RANKS_VARIABLE, "1")  # as the launcher's ranks have it
        with contextlib.redirect_stdout(io.StringIO()):
            parse_arguments(step.groups, rest, "", step.old_flags)
    except ThreestepError as problem:
        return "" if "needs the package trackio" in str(problem) else str(problem)
    finally:
        os.environ.pop("WORLD_SIZE")
        os.environ.update({} if before is None else {"WORLD_SIZE": before})
    return ""
