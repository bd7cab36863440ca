"""Checks of an output folder before a run, made at the start, since a run that is trained must be able to end.

A run replaces and removes below its folder. A link there would lead it out of the folder, and a file where it makes a
folder would end it with its model. The folder itself may be a link.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.media_names import SAMPLE_MEDIA
from training.utils.run.run_folder import log_names

_REPLACED_FOLDERS = ("model", "critic", "model_ema")  # by a rename, at the end
_FOLDERS = (*_REPLACED_FOLDERS, "checkpoints", "profile", SAMPLE_MEDIA)
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
            f"--output_dir expects a folder, got {folder}, which is {_kind(folder)}; remove it, or name another"
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
        raise ThreestepError(f"{name} expects {expected}, got '{path}', which is {_kind(path)}; name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refused = None if os.access(path.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as problem:
        refused = "a file is in its way" if isinstance(problem, FileExistsError) else problem.strerror
    if refused:
        raise ThreestepError(f"{name} '{path}' cannot be written: {path.parent}: {refused}; name another place")


def _unfit(folder: Path, also: Sequence[str]) -> Iterator[str]:
    """A sentence for each thing that a run cannot write over."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    folders = (*_FOLDERS, *(name for name in also if name.endswith("/")))
    files = (*log_names(), *_FILES, *(name for name in also if not name.endswith("/")))
    for path in (*(folder / name for name in folders), *steps):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            yield _instead(path, "a folder")
        elif path.exists() and not os.access(path, os.W_OK | os.X_OK):
            yield f"--output_dir: {path} cannot be written to (Permission denied); change that, or name another folder"
    for path in (folder / name for name in files):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            yield _instead(path, "a file")
        elif path.name in log_names() and path.exists() and not os.access(path, os.W_OK):
            yield f"--output_dir: {path} cannot be written to (Permission denied); change that, or name another folder"
    for path in (folder / name for name in _REPLACED_FOLDERS):
        if os.path.ismount(path):
            yield (
                f"--output_dir: {path} is a mounted file system, and a run replaces its model by a rename; mount it at "
                f"{folder}, or name another folder"
            )


def _instead(path: Path, expected: str) -> str:
    return (
        f"--output_dir expects {expected} of the run's own at {path}, or nothing, got {_kind(path)}; remove it, or "
        "name another folder"
    )


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {os.readlink(path)}{'' if path.exists() else ', which is not there'}"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "neither file nor folder"
