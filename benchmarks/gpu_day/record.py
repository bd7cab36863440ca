"""The record of one part: a row for every case, also for what failed, did not fit or was skipped; written after each.

A part has a deadline. The case that meets it ends there, the others are skipped by name, and what was measured stands.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.machine import is_out_of_memory

RAW = "raw"  # figures under this name are for the JSON file alone
Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


class PartIsOver(Exception):
    """The part's time is over."""


class NotHere(Exception):
    """What a case needs is missing; the sentence says what."""


@dataclass
class Report:
    """part: its number. out: the folder of its files. full: on the sizes that a GPU is for, else tiny ones.
    only: words of which a case's name has one; empty: all cases. run: runs `python WORDS` with further variables.
    """

    part: int
    title: str
    out: Path
    full: bool
    seconds: float
    head: Mapping[str, Any] = field(default_factory=dict)
    only: Sequence[str] = ()
    run: Run = field(default_factory=lambda: subprocess_run)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()

    @property
    def left_seconds(self) -> float:
        return self.seconds - (time.monotonic() - self._started)

    @property
    def place(self) -> Path:
        """A folder for models, data and runs."""
        folder = self.out / f"part{self.part}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def case(self, group: str, name: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """Measure one case; return its figures, None where there are none. group: cases that share a table."""
        figures: dict[str, Any] | None = None
        if self.only and not any(word in f"{group}: {name}" for word in self.only):
            self._note(group, name, "skipped: not asked for (--only)")
        elif self.left_seconds <= 0:
            self._note(group, name, f"skipped: the part's {self.seconds:g} s were over")
        else:
            started = time.monotonic()
            result, figures, trace = self._measured(measure)
            case_seconds = round(time.monotonic() - started, 1)
            self._note(group, name, result, figures or {}, {"case_seconds": case_seconds, **trace})
        return figures

    def skip(self, group: str, name: str, why: str) -> None:
        self._note(group, name, f"skipped: {why}")

    def _measured(self, measure: Callable[[], Mapping[str, Any]]) -> tuple[str, dict[str, Any] | None, dict[str, str]]:
        try:
            with _alarm(self.left_seconds):
                return "measured", dict(measure()), {}
        except PartIsOver:
            return f"ended: the part's {self.seconds:g} s were over", None, {}
        except NotHere as reason:
            return f"skipped: {reason}", None, {}
        except Exception as problem:  # noqa: BLE001 - one case never ends the part
            words = "out of memory" if is_out_of_memory(problem) else f"failed: {_sentence(problem)}"
            return words, None, {"trace": traceback.format_exc()}
        finally:
            if self.full:
                _release()

    def _note(self, group: str, name: str, result: str, figures: Mapping[str, Any] = {}, more: Any = {}) -> None:  # noqa: B006
        self.rows.append({"group": group, "case": name, "result": result, "figures": dict(figures), **more})
        print(f"part {self.part}: {group}: {name}: {result}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write the table and the raw figures as they are by now."""
        (self.out / f"part{self.part}.md").write_text(self.table())
        raw = {"part": self.part, "title": self.title, "head": dict(self.head), "rows": self.rows}
        (self.out / f"part{self.part}.json").write_text(json.dumps(raw, indent=2, default=str))

    def table(self) -> str:
        """Return Markdown: the machine, and for each group a table with a row for each of its cases."""
        lines = [f"# Part {self.part}: {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.head.items()]
        for group in dict.fromkeys(row["group"] for row in self.rows):
            rows = [row for row in self.rows if row["group"] == group]
            columns = [name for name in dict.fromkeys(name for row in rows for name in row["figures"]) if name != RAW]
            lines += ["", f"## {group}", "", f"| case | {' | '.join([*columns, 'result'])} |"]
            lines += ["| --- " * (len(columns) + 2) + "|"]
            for row in rows:
                cells = [_cell(row["figures"].get(name)) for name in columns]
                lines.append(f"| {_cell(row['case'])} | {' | '.join([*cells, _cell(row['result'])])} |")
        return "\n".join(lines) + "\n"


def subprocess_run(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` with these variables added; killed where a part's time is over."""
    import os

    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Inside, PartIsOver is raised after so many seconds."""

    def over(*_: Any) -> None:
        raise PartIsOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _release() -> None:
    """Give the memory of a case back before the next."""
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _sentence(problem: Exception) -> str:
    return str(problem) if isinstance(problem, ThreestepError) else f"{type(problem).__name__}: {first_line(problem)}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
