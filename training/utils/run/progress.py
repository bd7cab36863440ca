"""Progress of a loop, from rank 0 alone: a bar on a terminal and in a notebook, lines in a log that is a file."""

from __future__ import annotations

import html
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from training.utils.base.console import LogPace, print_to


@dataclass(frozen=True)
class ShownFigure:
    """A number to show with the progress. name: unique in a step. form: as `format` takes it. is_mean: a log line has
    its mean over the steps since the last line, otherwise its latest value."""

    name: str
    value: float
    form: str = ".3f"
    unit: str = ""
    is_mean: bool = True

    def __str__(self) -> str:
        return " ".join(word for word in (self.name, format(self.value, self.form), self.unit) if word)


def progress_bar(
    total: int, name: str, is_main_rank: bool, unit: str = "step", *, on_terminal_only: bool = False, done: int = 0,
    pace: LogPace | None = None,
) -> tqdm:  # fmt: skip
    """A bar on rank 0's stderr, or in a notebook's cell: steps, the figures given to `show`, time left.

    If stderr is neither, it prints lines at the given pace instead, or nothing (`on_terminal_only`).
    done: the steps that a resumed run starts with.
    """
    common: dict[str, Any] = {
        "total": total,
        "initial": done,
        "desc": name,
        "unit": unit,
        "disable": not is_main_rank or (on_terminal_only and not sys.stderr.isatty()),
    }
    if sys.stderr.isatty():
        return _Bar(**common, dynamic_ncols=True, mininterval=0.2)
    if in_notebook():
        return _Cell(**common, mininterval=0.2)
    return _Lines(**common, miniters=1, mininterval=0.0, pace=pace or LogPace())


def in_notebook() -> bool:
    """True in a kernel of Jupyter, Colab and the like, where IPython shows what a cell gives."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def show(bar: tqdm, *figures: ShownFigure, steps: int = 1) -> None:
    """Count `steps` as done and show `figures` with them."""
    if isinstance(bar, _Lines):
        bar.add(figures)
    else:
        bar.set_postfix_str(", ".join(map(str, figures)), refresh=False)
    bar.update(steps)


class _Bar(tqdm):
    """A bar that starts no thread, which would outlive the run."""

    monitor_interval = 0
    disable: bool


class _Cell(_Bar):
    """The same as an output of a notebook's cell, which stands for the last state in the end."""

    def __init__(self, **common: Any) -> None:
        self._output: Any = None
        super().__init__(**common)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        from IPython.display import HTML, display

        known = self.format_dict
        left = ""
        if self.n > self.initial and self.n < self.total:
            seconds = (self.total - self.n) * known["elapsed"] / (self.n - self.initial)
            left = f", {tqdm.format_interval(seconds)} left"
        text = (
            f"{self.desc}: {self.unit} {self.n:,} of {self.total:,}{self.postfix and f', {self.postfix}' or ''}{left}"
        )
        shown = HTML(f'<progress value="{self.n}" max="{self.total}"></progress> {html.escape(text)}')
        if self._output is None:
            self._output = display(shown, display_id=True)
        else:
            self._output.update(shown)
        return True

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: lines of the log are other outputs."""

    def close(self) -> None:
        if not self.disable:
            self.display()
        self.disable = True


class _Lines(_Bar):
    """The same for a log that is a file: lines at the given pace."""

    def __init__(self, *, pace: LogPace, **common: Any) -> None:
        self._pace = pace
        self._last = time.monotonic() if pace.waits else None  # the time of the last line
        self._figures: list[tuple[ShownFigure, ...]] = []
        super().__init__(**common)

    def add(self, figures: tuple[ShownFigure, ...]) -> None:
        """Keep the figures of a step for the next line."""
        if not self.disable:
            self._figures.append(figures)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        done, now = self.n - self.initial, time.monotonic()
        is_last = self.n == self.total and not self._pace.waits
        if done == 0 or not (self._last is None or is_last or now - self._last >= self._pace.seconds):
            return True
        self._last = now
        count, has_means = len(self._figures), any(each.is_mean for step in self._figures for each in step)
        means = f" (means of {count} {self.unit}s)" if count > 1 and has_means else ""
        parts = [f"{self.desc}: {self.unit} {self.n:,} of {self.total:,}{means}", *self._summed_up()]
        if self.n < self.total:
            left = (self.total - self.n) * self.format_dict["elapsed"] / done
            parts.append(f"{tqdm.format_interval(left)} left")
        print_to(self.fp, ", ".join(parts))
        return True

    def _summed_up(self) -> list[str]:
        """The figures of the last step, each as its mean since the last line or its latest value, in words."""
        steps_shown, self._figures = self._figures, []
        words = []
        for last in steps_shown[-1] if steps_shown else ():
            steps = [figure.value for step in steps_shown for figure in step if figure.name == last.name]
            value = sum(steps) / len(steps) if last.is_mean else last.value
            words.append(str(replace(last, value=value)))
        return words

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: a printed line stays."""

    def close(self) -> None:
        self.disable = True  # tqdm's close would add an empty line
