"""The files that a run leaves in its folder: those that it needs to begin, and those that it can end without. The
folder is checked at the start, since a run that is trained must be able to end.

A run replaces and removes below its folder. A link there would lead it out of the folder, and a file where it makes a
folder would end it with its model. The folder itself may be a link."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.utils.base.console import log
from training.utils.base.credentials import redacted_value
from training.utils.base.errors import Mistakes, ThreestepError, disk_errors, in_words
from training.utils.base.storage import parse_json, replace_file
from training.utils.contracts.rows import SAMPLE_MEDIA
from training.utils.flags.flags import marked
from training.utils.plugins.registry import added

BAD_STEPS = "bad_steps.jsonl"
METRICS = "metrics.jsonl"
DIVERGENCE = "divergence.jsonl"  # sentences on signs that the run has diverged
ROLLOUTS = "rollouts.jsonl"  # which weights drew what, and what became of each prompt
LOGS = (METRICS, "samples.jsonl", BAD_STEPS, DIVERGENCE, ROLLOUTS)
_MOST_WAITING_BYTES = 64 * 2**20  # a line of metrics has about one kilobyte


def log_names() -> tuple[str, ...]:
    """The files of a run to which its steps append: `LOGS`, and those of plugins. A run that resumes cuts them back."""
    return (*LOGS, *added("logs", LOGS))


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a rollouts.jsonl, or of the one in a run's folder; none where there is no such file. Serves
    pages about runs, and schedules that are drawn again. `step3_ppo.contracts.rollouts` says what a line has."""
    path = path / ROLLOUTS if path.is_dir() else path
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            value = parse_json(line)
        except ValueError:  # the last one of a run that was killed, or a damaged one
            continue
        if isinstance(value, dict) and value.keys() & {"unused", "rows"} and value.keys() & {"first", "positions"}:
            found.append(value)
    return found


class EndedRun(NamedTuple):
    """A run that has written its models and figures. settings: by the flags' names. trains: it was more than an
    evaluation."""

    folder: RunFolder
    settings: Mapping[str, Any]
    trains: bool


class RunFolder:
    """Paths and small files in OUTPUT_DIR. Only rank 0 writes."""

    def __init__(self, output_dir: str | Path, is_main_rank: bool) -> None:
        self.path = Path(output_dir)
        self.is_main_rank = is_main_rank
        self._logs: dict[str, RunLog] = {}
        self._refused: dict[str, str] = {}  # texts of small files that the disk refused, by name
        self._lost_media = Counter[str]()
        if is_main_rank:
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_config(self, settings: dict[str, Any], comment: str, chosen: Collection[str] = ()) -> None:
        """Write every resolved setting to config.yaml, below a comment line. chosen: as of `marked`."""
        import yaml  # which --help does without

        text = yaml.safe_dump(redacted_value(settings), sort_keys=True, allow_unicode=True)
        self._write("config.yaml", f"# {comment}\n{marked(text, chosen)}")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON object to the file `name`."""
        self._write(name, json.dumps(redacted_value(content), indent=2) + "\n")

    def write_figures(self, name: str, content: dict[str, Any]) -> None:
        """As `write_json`, for results of training: if the disk refuses them, warn, and try once more in `settle`."""
        text = json.dumps(redacted_value(content), indent=2) + "\n"
        try:
            self._write(name, text)
        except OSError as problem:
            self._refused[name] = text
            log(f"warning: {self.path / name} cannot be written ({problem.strerror}); retrying at the end")

    def run_log(self, name: str) -> RunLog:
        """One of `log_names`, always the same object."""
        return self._logs.setdefault(name, RunLog(self.path / name))

    def append_samples(self, samples: list[dict[str, Any]]) -> None:
        """Append one JSON object a line to samples.jsonl, now or once the disk takes it."""
        if self.is_main_rank:
            self.run_log("samples.jsonl").append(json.dumps(sample, ensure_ascii=False) for sample in samples)

    def write_medium(self, name: str, content: bytes, kind: str) -> None:
        """Write a file of `SAMPLE_MEDIA`, unless the disk refuses it. kind: a word for it."""
        if not self.is_main_rank:
            return
        try:
            (self.path / SAMPLE_MEDIA).mkdir(exist_ok=True)
            replace_file(self.path / SAMPLE_MEDIA / name, content)
        except OSError as problem:
            if not self._lost_media:
                log(f"warning: a sample's {kind} cannot be written ({in_words(problem)}); training continues")
            self._lost_media[kind] += 1

    def settle(self) -> None:
        """At the end of a run, after its model: try once more to write what the disk refused; log what is lost."""
        for one in self._logs.values():
            one.settle()
        for name, text in self._refused.items():
            try:
                self._write(name, text)
            except OSError as problem:
                log(f"warning: {self.path / name} is lost ({problem.strerror})")
        for kind, lost in self._lost_media.items():
            log(f"warning: {lost:,} {kind}s of {self.path / SAMPLE_MEDIA} are lost")
        self._refused, self._lost_media = {}, Counter()

    def log_sizes(self) -> dict[str, int]:
        """The bytes of each log, which grow during the run."""
        paths = [self.path / name for name in log_names()]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def cut_logs(self, sizes: dict[str, int]) -> None:
        """Cut the logs back to the sizes that `log_sizes` gave; remove those that it does not name."""
        if not self.is_main_rank:
            return
        for path in (self.path / name for name in log_names()):
            if path.name not in sizes:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])

    def _write(self, name: str, text: str) -> None:
        if self.is_main_rank:
            replace_file(self.path / name, text)


class RunLog:
    """Lines appended to the file `path`. Those that the disk refuses wait in memory, and are written with the next.

    A line that arrived in part is cut off before it is written again. Of those that wait, the oldest are given up
    beyond 64 MiB. The first refusal is one warning; `settle` logs at the end what is lost.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._whole_bytes: int | None = None  # the file's size without a line in part; None: as it is
        self._given_up = 0
        self._refused: OSError | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Write `lines`, each without its newline, or let them wait."""
        for line in lines:
            self._waiting.append(line.encode("utf-8", "replace") + b"\n")  # half a surrogate pair is not UTF-8
            self._waiting_bytes += len(self._waiting[-1])
        self._try_to_write()
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._given_up += 1

    def settle(self) -> None:
        """Try once more; log what is lost, or that lines had to wait."""
        self._try_to_write()
        lost = self._given_up + len(self._waiting)
        if lost:
            log(f"warning: {lost:,} lines of {self.path} are lost ({_reason(self._refused)})")
        elif self._refused is not None:
            log(f"{self.path} is complete: the lines that could not be written earlier have been added")
        self._refused, self._given_up = None, 0

    def _try_to_write(self) -> None:
        if not self._waiting:
            return
        try:
            with disk_errors(self.path):
                self._write(b"".join(self._waiting))
        except OSError as problem:
            if self._refused is None:
                log(
                    f"warning: {self.path} cannot be written ({_reason(problem)}); its lines stay in memory, and "
                    "training continues"
                )
            self._refused = problem
            return
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, content: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if self._whole_bytes is not None and size > self._whole_bytes:
                os.ftruncate(file.fileno(), self._whole_bytes)
                size = self._whole_bytes
            self._whole_bytes = size
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        self._whole_bytes = None


def _reason(problem: OSError | None) -> str:
    return str(problem.strerror if problem is not None else "they were too many for memory")


_REPLACED_FOLDERS = ("model", "critic")  # by a rename, at the end
_FOLDERS = (*_REPLACED_FOLDERS, "checkpoints", SAMPLE_MEDIA)
_FILES = (
    "config.yaml", "data_report.json", "environment.json", "reward_report.json", "summary.json",
    ".running", "checkpoints/latest",
)  # fmt: skip


def make_output_dir(output_dir: str | Path, also: Sequence[str] = ()) -> None:
    """Make the folder of a run and check its content. ThreestepError if a run could not end there.

    also: names of what else the run writes in it; a folder's ends with a slash
    """
    folder = Path(output_dir)
    if os.path.lexists(folder) and not folder.is_dir():
        raise ThreestepError(
            f"--output_dir expects a folder, got {folder}, which is {_kind(folder)}; remove it, or choose another"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ThreestepError(f"--output_dir {output_dir} cannot be written to ({problem.strerror})") from problem
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ThreestepError(f"--output_dir {output_dir} cannot be written to (Permission denied)")
    mistakes = Mistakes()
    for sentence in _unfit(folder, also):
        mistakes.add(sentence)
    mistakes.raise_if_any()


def check_place(name: str, place: str | Path, is_folder: bool = False) -> None:
    """Make the folders above a file or folder that a program will write, before it works for it. ThreestepError if it
    could not be written: they cannot be made, or something of the other kind is there.

    name: of the flag or argument that gives the place
    """
    path = Path(place)
    if path.exists() and path.is_dir() != is_folder:
        expected = "a folder" if is_folder else "a file"
        raise ThreestepError(f"{name} expects {expected}, got '{path}', which is {_kind(path)}; choose another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refused = None if os.access(path.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as problem:
        refused = "a file is in the way" if isinstance(problem, FileExistsError) else problem.strerror
    if refused:
        raise ThreestepError(f"{name} '{path}' cannot be written: {path.parent}: {refused}; choose another place")


def _unfit(folder: Path, also: Sequence[str]) -> Iterator[str]:
    """A sentence for each thing that a run cannot write over."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    folders = (*_FOLDERS, *(name for name in also if name.endswith("/")))
    files = (*log_names(), *_FILES, *(name for name in also if not name.endswith("/")))
    for path in (*(folder / name for name in folders), *steps):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            yield _instead(path, "a folder")
        elif path.exists() and not os.access(path, os.W_OK | os.X_OK):
            yield f"--output_dir: {path} cannot be written to (Permission denied); change it, or choose another folder"
    for path in (folder / name for name in files):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            yield _instead(path, "a file")
        elif path.name in log_names() and path.exists() and not os.access(path, os.W_OK):
            yield f"--output_dir: {path} cannot be written to (Permission denied); change it, or choose another folder"
    for path in (folder / name for name in _REPLACED_FOLDERS):
        if os.path.ismount(path):
            yield (
                f"--output_dir: {path} is a mounted file system, but a run replaces its model by renaming; mount it at "
                f"{folder}, or choose another folder"
            )


def _instead(path: Path, expected: str) -> str:
    return (
        f"--output_dir expects {expected} of this run at {path}, or nothing, but found {_kind(path)}; remove it, or "
        "choose another folder"
    )


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {os.readlink(path)}{'' if path.exists() else ', which does not exist'}"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "neither a file nor a folder"
