"""The command that the user typed, for what tells them to type it again. Knows no program by name."""

from __future__ import annotations

import os

COMMAND_VARIABLE = "THREESTEP_COMMAND"  # set by the console command `threestep`, also for the ranks that it starts


def typed_command() -> str | None:
    """E.g. `threestep sft`; None if the program was not started by the console command."""
    return os.environ.get(COMMAND_VARIABLE) or None
