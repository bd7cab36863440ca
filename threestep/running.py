"""Runs a step's program with settings as Python: in this process, or on ranks that are launched. Ends with a
ThreestepError where a command line would end its process."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from threestep.own_package import VARIABLE, is_apart, loaded_name
from threestep.process_state import callers_state
from training.utils.base.console import RANKS_VARIABLE, output_may_be_lost, write_to
from training.utils.base.credentials import lend, redacted
from training.utils.base.errors import ThreestepError, disk_error_in, disk_sentence
from training.utils.base.machine import is_out_of_memory, out_of_memory_sentence
from training.utils.base.user_files import functions_given
from training.utils.flags.arguments import words_of
from training.utils.run.program import no_telemetry

_FRONT = Path(__file__).parent
_MISTAKE = "error: "


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as a command line's flags. None and an empty list keep a default; a dict becomes JSON."""
    import json

    words = []
    for name, value in settings.items():
        plain = [*value] if isinstance(value, (tuple, set)) else json.dumps(value) if isinstance(value, dict) else value
        if isinstance(plain, os.PathLike):
            plain = os.fspath(plain)
        words += [] if plain == [] else words_of(name, plain)
    return words


def run_here(program: str, words: Sequence[str], functions: Mapping[str, Callable[..., Any]], folder: Path) -> None:
    """Run a step in this process, into `folder`; functions: those that its flags name."""
    try:
        with callers_state(), functions_given(functions), output_may_be_lost():
            no_telemetry(os.environ)
            importlib.import_module(loaded_name(program)).main(words)
    except SystemExit as end:
        raise ThreestepError(_stopped(end.code, folder)) from end
    except Exception as problem:
        if is_out_of_memory(problem):
            raise ThreestepError(out_of_memory_sentence(problem)) from problem
        refusal = disk_error_in(problem)
        if refusal is None:
            raise
        raise ThreestepError(disk_sentence(refusal)) from problem


def run_on_ranks(command: str, words: Sequence[str], ranks: int, folder: Path) -> None:
    """Run `threestep COMMAND WORDS` on so many ranks of this machine, into `folder`. Their output goes to this
    process's streams, a notebook's too. ThreestepError with the ranks' error message, and if they were stopped."""
    environment = {name: value for name, value in os.environ.items() if name != RANKS_VARIABLE}
    if is_apart():
        environment[VARIABLE] = "1"
    lend(list(words), environment)
    process = subprocess.Popen(
        [sys.executable, str(_FRONT), command, *map(redacted, words), f"--num_ranks={ranks}"],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        lines = _passed_on(process, process.stdout)
    if process.returncode:
        raise ThreestepError(_error_message(lines, process.returncode))
    # Ranks that were asked to stop end well too, with a checkpoint and without figures.
    if (folder / "checkpoints" / "latest").exists() and not (folder / "summary.json").exists():
        raise ThreestepError(_stopped(0, folder))


def _passed_on(process: subprocess.Popen[str], stream: IO[str]) -> list[str]:
    """Print the process's output until it ends; return its lines. Ctrl-C goes to it, which ends with a checkpoint."""
    lines: list[str] = []
    while True:
        try:
            for line in stream:
                lines.append(line.rstrip("\n"))
                write_to(sys.stdout, line)
            return lines
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)


def _error_message(lines: Sequence[str], code: int) -> str:
    for place, line in enumerate(lines):
        if line.startswith(_MISTAKE):
            # A list of mistakes has a line for each.
            more = [later for later in lines[place + 1 :] if later.startswith("  - ")]
            return "\n".join([line.removeprefix(_MISTAKE), *more])
    last = "; the last line was: " + lines[-1] if lines else ""
    return f"the ranks exited with code {code}; see their output{last}"


def _stopped(code: Any, folder: Path) -> str:
    if code:
        return f"the run exited with code {code}; see its output"
    return (
        "the run was stopped and wrote a checkpoint but no model; to resume, repeat the call with "
        f"resume=True, output_dir={str(folder)!r}"
    )
