"""What a run prints, from rank 0 alone. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from training.utils.run.credentials import redacted


def log(sentence: str, is_main_rank: bool = True) -> None:
    """Print one line on rank 0, above an open progress bar."""
    if not is_main_rank:
        return
    sentence = redacted(sentence)
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(sentence, file=sys.stdout)  # clears an open bar and draws it again
    else:
        sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


def started_as_main_rank() -> bool:
    """By the launcher's environment; for what is printed before the ranks meet."""
    return os.environ.get("RANK", "0") == "0"


def note(sentence: str) -> None:
    """Print one line to standard error, on rank 0: for programs whose standard output is their result."""
    if started_as_main_rank():
        sys.stderr.write(redacted(sentence) + "\n")


@dataclass(frozen=True)
class LogPace:
    """How often a run whose log is a file writes a line of progress: once at least `steps` steps and `seconds` seconds
    have passed since the last one. The first and the last step always have a line."""

    steps: int = 1
    seconds: float = 60.0
