"""What a run prints: log lines and progress bars, from rank 0 alone."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm


def log(sentence: str, is_main_rank: bool = True) -> None:
    """Print one line on rank 0, above an open progress bar."""
    if not is_main_rank:
        return
    if sys.stderr.isatty():
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
        sys.stderr.write(sentence + "\n")


def progress_bar(
    total: int, name: str, is_main_rank: bool, unit: str = "step", on_terminal_only: bool = False, done: int = 0
) -> tqdm:
    """A bar on rank 0's stderr: steps, the figures given to `show`, time left.

    If stderr is not a terminal, it prints a line at each tenth of the way instead, or nothing (`on_terminal_only`).
    done: the steps that a resumed run starts with.
    """
    kind, interval = (tqdm, 0.2) if sys.stderr.isatty() else (_Tenths, 0.0)
    return kind(
        total=total,
        initial=done,
        desc=name,
        unit=unit,
        disable=not is_main_rank or (on_terminal_only and not sys.stderr.isatty()),
        dynamic_ncols=True,
        mininterval=interval,
    )


def show(bar: tqdm, figures: str) -> None:
    """Count one step as done and show `figures` at the end of the bar."""
    bar.set_postfix_str(figures, refresh=False)
    bar.update()


class _Tenths(tqdm):
    """A bar for log files: one line at each tenth of the way, at most ten in all."""

    _tenth = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        tenth = 10 * self.n // max(self.total, 1)
        if self._tenth == 0:  # a resumed run starts past some of them
            self._tenth = 10 * self.initial // max(self.total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            done = self.n - self.initial
            left = ""
            if done and self.n < self.total:
                seconds = (self.total - self.n) * self.format_dict["elapsed"] / done
                left = f", {tqdm.format_interval(seconds)} left"
            figures = f", {self.postfix}" if self.postfix else ""
            self.fp.write(f"{self.desc}: {self.unit} {self.n} of {self.total}{figures}{left}\n")
            self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: a printed line stays."""

    def close(self) -> None:
        self.disable = True  # tqdm's own would add an empty line
