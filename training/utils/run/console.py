"""What a run prints, from rank 0 alone. Cheap to import: `--help` reaches this module.

A terminal that is gone, or a log on a full disk, ends no run: what cannot be printed is left out.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO


def log(sentence: str, is_main_rank: bool = True) -> None:
    """Print one line on rank 0, above an open progress bar."""
    if not is_main_rank:
        return
    if sys.stderr.isatty():
        from tqdm import tqdm

        with suppress(OSError):
            tqdm.write(sentence, file=sys.stdout)  # clears an open bar and draws it again
            sys.stdout.flush()
    else:
        print_to(sys.stdout, sentence)


def print_to(stream: TextIO, sentence: str) -> None:
    """Print one line, if that is possible."""
    with suppress(OSError):
        stream.write(sentence + "\n")
        stream.flush()


def let_streams_end() -> None:
    """Flush standard output and error; let one that cannot be flushed lead nowhere, or Python ends with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def started_as_main_rank() -> bool:
    """By the launcher's environment; for what is printed before the ranks meet."""
    return os.environ.get("RANK", "0") == "0"


def note(sentence: str) -> None:
    """Print one line to standard error, on rank 0: for programs whose standard output is their result."""
    if started_as_main_rank():
        print_to(sys.stderr, sentence)


@dataclass(frozen=True)
class LogPace:
    """How often a run whose log is a file writes a line of progress: once at least `steps` steps and `seconds` seconds
    have passed since the last one. The first and the last step always have a line."""

    steps: int = 1
    seconds: float = 60.0
