"""The command that the user typed, for messages that tell them to type it again. Knows no program by name."""

from __future__ import annotations

import os

# Set by the console command `threestep` and by scripts/*.sh, also for the ranks that they start.
COMMAND_VARIABLE = "THREESTEP_COMMAND"
# How many of a program's first words such a script put there itself.
OWN_WORDS_VARIABLE = "THREESTEP_OWN_WORDS"
# In the environment of a step that a program runs together with the others on the same data.
WHOLE_RUN_VARIABLE = "THREESTEP_WHOLE_RUN"


def typed_command() -> str | None:
    """E.g. `threestep sft` or `bash scripts/step1_sft.sh`; None if the program was started by neither."""
    return os.environ.get(COMMAND_VARIABLE) or None


def resuming_command(program: str, ranks: int) -> str:
    """The command that starts `program` again on as many ranks, without its flags: the one that was typed where that
    is known. program: the module, as `python -m` takes it."""
    typed = typed_command()
    if typed is not None:
        return f"{typed} --num_ranks {ranks}"
    if "THREESTEP_RANKS" not in os.environ and ranks == 1:
        return f"python -m {program}"
    return f"THREESTEP_RANKS={ranks} python -m training.utils.run.launch {program}"
