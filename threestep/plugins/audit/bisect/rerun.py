"""A run taken up again before a step, which is recorded: in a folder of its own, by the program that ran.

The run's folder is read and never written. The program is ended once the step is written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

import training
from threestep.plugins.audit.bisect.digest_files import step_of
from threestep.plugins.audit.recording.schema import DIGESTS
from threestep.plugins.audit.started import outside_of_ranks
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object

if TYPE_CHECKING:
    from threestep.plugins.audit.bisect.digest_files import RunDigests, StepKey

_WAIT_SECONDS = 0.05
_LAUNCH = "training.utils.run.launch"
_WHERE = "import os, training; print(os.path.dirname(os.path.abspath(training.__file__)))"


class Running(Protocol):
    """A started program."""

    def poll(self) -> int | None:
        """The exit code, once it has ended."""

    def stop(self) -> None:
        """End it, and what it started."""


# Starts a program on some ranks: the words after Python's name, the ranks, the file of its output.
Start = Callable[[Sequence[str], int, Path], Running]


@dataclass(frozen=True)
class Rerun:
    """line: of the step, as it was written again. folder: of the step's record. began: the checkpoint's step; 0: the
    beginning. environment: of environment.json, in which it was run again."""

    line: Mapping[str, Any]
    folder: Path
    began: int
    environment: Mapping[str, Any]


def checkpoint_before(run: RunDigests, step: int) -> int:
    """The last step before this one after which the run has a checkpoint; 0: none."""
    folder = run.folder / "checkpoints"
    names = [path.name for path in folder.glob("step_*") if (path / "manifest.json").is_file()]
    steps = [int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdecimal()]
    return max((own for own in steps if own < step), default=0)


def rerun(
    run: RunDigests,
    key: StepKey,
    folder: Path,
    start: Start,
    *,
    first: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Rerun:
    """Record a step of a run in `folder`, which is replaced. ThreestepError if the program ends before it. first: the
    first step that must be run again. settings: in place of the run's."""
    shutil.rmtree(folder, ignore_errors=True)
    began = checkpoint_before(run, key[0] if first is None else first)
    ranks = run.ranks_at(key[0])
    if began:
        name = f"step_{began:06}"
        shutil.copytree(run.folder / "checkpoints" / name, folder / "checkpoints" / name)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_name(f"{folder.name}.yaml")
    config.write_text(_config(run, folder, {"record_steps": [key[0]], **(settings or {})}), encoding="utf-8")
    output = folder.with_name(f"{folder.name}.log")
    words = [run.program, "--config", str(config), *(["--resume"] if began else [])]
    running = start(words, ranks, output)
    try:
        line = _awaited(running, folder / DIGESTS, key)
    finally:
        running.stop()
    if line is None:
        last = output.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["nothing"]
        raise ThreestepError(
            f"the rerun of {run.folder} ended before step {key[0]:,}; the last line it printed was: {last[0]}; its "
            f"full output is in {output}"
        )
    part = f"_update{key[1]}" if key[1] else ""
    environment = read_json_object(str(folder / "environment.json")) or {}
    return Rerun(line, folder / "records" / f"step_{key[0]:06}{part}", began, environment)


def _config(run: RunDigests, folder: Path, others: Mapping[str, Any]) -> str:
    """The run's settings with another folder, and nothing sent anywhere. others: settings in place of the run's."""
    import yaml

    own: dict[str, Any] = {
        "output_dir": str(folder),
        "digests": True,
        "resume": None,
        "overwrite": False,
        "report_to": "none",
        "push_to_hub": False,
        "hub_model_id": None,
        "hub_private_repo": None,
        "save_every": 0,
        "save_epochs": 0.0,
        **others,
    }
    settings = {**run.settings, **{name: value for name, value in own.items() if name in run.settings}}
    return yaml.safe_dump(settings, sort_keys=True, allow_unicode=True)


def _awaited(running: Running, path: Path, key: StepKey) -> Mapping[str, Any] | None:
    """The line of the step, once it is there; None if the program ended before."""
    seen = 0
    while True:
        code = running.poll()
        content = path.read_bytes() if path.is_file() else b""
        if len(content) != seen:
            seen = len(content)
            for text in content.decode("utf-8", "replace").splitlines():
                line = _parsed(text) or {}
                if (line.get("step"), line.get("update", 0)) == key:
                    return step_of(text, path)
        if code is not None:
            return None
        time.sleep(_WAIT_SECONDS)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:  # a line that is being written
        return None
    return found if isinstance(found, dict) else None


@dataclass
class _Process:
    """A process, and all below it."""

    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        """Kill them: what they leave in their folder is not read."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        for each in (*below, self.process):
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


def starter(python: str | None, code: str | None = None, threads: int | None = None) -> Start:
    """Return what starts a program. ThreestepError for an interpreter or a folder without the project.

    python: the interpreter; None: this one. code: a checkout of the project; None: what the interpreter imports.
    threads: of each rank; None: as a run takes them.
    """
    if code is not None:
        package = _package_in(code)
    else:
        package = str(Path(training.__file__).parent) if python is None else _package_of(python)

    def start(words: Sequence[str], ranks: int, output: Path) -> Running:
        command = [python or sys.executable, package, _LAUNCH, *words]
        environment = {**outside_of_ranks(os.environ), "THREESTEP_RANKS": str(ranks)}
        environment |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with open(output, "wb") as file:
            return _Process(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )
            )

    return start


def _package_in(code: str) -> str:
    """The package in a checkout."""
    package = Path(code).resolve() / "training"
    if not (package / "__main__.py").is_file():
        raise ThreestepError(
            f"--code_a and --code_b expect a threestep checkout, but {code} has no training/__main__.py; make a "
            "checkout with `git worktree add FOLDER COMMIT`"
        )
    return str(package)


def _package_of(python: str) -> str:
    """The folder of the project that an interpreter imports."""
    try:
        found = subprocess.run([python, "-c", _WHERE], capture_output=True, text=True, cwd="/", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ThreestepError(f"--python_a and --python_b expect an interpreter, got {python}: {problem}") from problem
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ThreestepError(
            f"--python_a and --python_b expect an interpreter with threestep installed, got {python}: {last}"
        )
    return found.stdout.strip().splitlines()[-1]
