"""Checkpoints on disk: written to a temporary folder, checksummed, then published.

    OUTPUT_DIR/checkpoints/step_000100/           any files; manifest.json has each one's size and sha256, and its own
    OUTPUT_DIR/checkpoints/step_000200.partial/   being written, or left by a killed run
    OUTPUT_DIR/checkpoints/step_000200.universal/ converted for other ranks, while a run resumes from it
    OUTPUT_DIR/checkpoints/latest                 a name, replaced atomically

Every byte is hashed when written and when read: at half a gigabyte a second or more, that costs little compared with
writing it. Knows nothing of engines and ranks: one process calls it. The records that a checkpoint holds as JSON are
compared with those of this version of the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import flush_to_disk, parse_json, sha256_of, sha256_of_object
from training.utils.checkpoints.arguments import LATEST

_Record = TypeVar("_Record")
MANIFEST = "manifest.json"
FORMAT = 2  # 1 held pickles, and is not read
MANIFEST_KEYS = ("format", "step", "settings", "defaults", "chosen", "files", "sha256")
_REMEDY = "resume with the version of Threestep that wrote the checkpoint"
_PARTIAL = ".partial"
_OLD = ".old"
_UNIVERSAL = ".universal"


class CheckpointFolder:
    """OUTPUT_DIR/checkpoints."""

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(output_dir) / "checkpoints"

    def of(self, step: int) -> Path:
        return self.path / f"step_{step:06d}"

    def partial(self, step: int) -> Path:
        """Folder in which the checkpoint of `step` is written before it is published."""
        return self.path / f"step_{step:06d}{_PARTIAL}"

    def universal(self, step: int) -> Path:
        """Folder in which the checkpoint of `step` is converted for other ranks or ZeRO stages."""
        return self.path / f"step_{step:06d}{_UNIVERSAL}"

    def begin(self, step: int, parts: Iterable[str] = ()) -> None:
        """Make an empty folder to write to, with folders `parts`, and remove what killed runs left."""
        self.clear()
        for part in ("", *parts):
            (self.partial(step) / part).mkdir(parents=True)

    def clear(self) -> None:
        """Remove half-written, replaced and converted checkpoints."""
        for path in self.path.glob("step_*"):
            if path.name.endswith((_PARTIAL, _OLD, _UNIVERSAL)):
                shutil.rmtree(path)

    def give_up(self, step: int) -> None:
        """Remove the files written for `step`; put back the checkpoint that they would have replaced."""
        final = self.of(step)
        old = final.with_name(final.name + _OLD)
        if old.exists() and not final.exists():
            os.rename(old, final)
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def publish(self, step: int, description: dict[str, Any]) -> Path:
        """Publish the files written for `step` as the latest checkpoint; its manifest records `description`."""
        partial, final = self.partial(step), self.of(step)
        _write_manifest(partial, {"format": FORMAT, "step": step, **description})
        old = final.with_name(final.name + _OLD)
        if final.exists():  # abandoned by resuming from an earlier checkpoint
            os.rename(final, old)
        os.rename(partial, final)
        flush_to_disk(self.path)
        self.point_to(final)
        if old.exists():
            shutil.rmtree(old)
        return final

    def point_to(self, checkpoint: Path) -> None:
        """Make `latest` name this checkpoint."""
        temporary = self.path / f".{LATEST}.{os.getpid()}"
        temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
        flush_to_disk(temporary)
        os.replace(temporary, self.path / LATEST)
        flush_to_disk(self.path)

    def steps(self) -> list[int]:
        """The steps of published checkpoints, damaged ones included, in ascending order."""
        matches = (re.fullmatch(r"step_(\d+)", path.name) for path in self.path.glob("step_*"))
        return sorted(int(match[1]) for match in matches if match is not None)

    def latest_first(self) -> list[Path]:
        """The checkpoint that `latest` names and those before it, newest first; all of them if it names none."""
        steps = self.steps()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            named = (self.path / LATEST).read_text(encoding="utf-8").strip()
            match = re.fullmatch(r"step_(\d+)", named)
            if match is not None:
                steps = [step for step in steps if step <= int(match[1])]
        return [self.of(step) for step in reversed(steps)]

    def latest_undamaged(self) -> tuple[Path | None, list[str]]:
        """The newest undamaged checkpoint, if any, and `NAME: problem` of each damaged one after it."""
        problems: list[str] = []
        for path in self.latest_first():
            problem = damage(path)
            if problem is None:
                return path, problems
            problems.append(f"{path.name}: {problem}")
        return None, problems

    def prune(self, newest: int, keep_last: int, others: Collection[int | None] = ()) -> None:
        """Keep the last `keep_last` (0: all) up to step `newest`, and `others`; later ones were abandoned."""
        steps = self.steps()
        last = [step for step in steps if step <= newest][-keep_last:] if keep_last else steps
        for step in steps:
            if (step not in last and step not in others) or step > newest:
                shutil.rmtree(self.of(step))


def damage(checkpoint: Path) -> str | None:
    """The damage of a published checkpoint, every byte read; None: none. ThreestepError if a later version wrote it."""
    try:
        content = parse_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files, digest = content["files"], content.pop("sha256")
    except OSError as problem:
        return f"{MANIFEST} cannot be read ({problem.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    if digest != sha256_of_object(content):
        return f"{MANIFEST} is damaged"
    _check_format(checkpoint, content)
    for name, entry in files.items():
        try:
            if (checkpoint / name).stat().st_size != entry["size_bytes"]:
                return f"{name} does not have the size it was written with"
            if sha256_of(checkpoint / name) != entry["sha256"]:
                return f"{name} does not have the content it was written with"
        except OSError as problem:
            return f"{name} cannot be read ({problem.strerror})"
    return None


def stranger(checkpoint: Path) -> str | None:
    """The file or link in an undamaged checkpoint that its manifest does not list, with what to do about it; None if
    there is none. Not damage: to skip the checkpoint for it would lose the steps since the one before."""
    listed = {MANIFEST, *read_manifest(checkpoint)["files"]}
    for folder, folders, files in os.walk(checkpoint):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            name = path.relative_to(checkpoint).as_posix()
            if path.is_symlink():
                return f"{name} is a link, but a checkpoint holds only files; replace it with its content, or remove it"
            if not path.is_dir() and name not in listed:
                return f"{name} is not in its {MANIFEST}, so it was added later; remove it"
    return None


def _check_format(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """ThreestepError if a later version of the program wrote the manifest."""
    unknown = sorted(manifest.keys() - set(MANIFEST_KEYS))
    written = manifest.get("format", 1)
    if written == 1:
        raise ThreestepError(f"{checkpoint} was pickled by a version before 0.1; resume or export it with that version")
    if not isinstance(written, int) or written > FORMAT or unknown:
        what = f"with {', '.join(unknown)} in its {MANIFEST}" if unknown else f"in format {written!r}"
        raise ThreestepError(
            f"{checkpoint} was written {what} by a later version of Threestep, but this version reads format "
            f"{FORMAT}; resume or export it with the later version"
        )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of an undamaged checkpoint."""
    return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))


def _write_manifest(folder: Path, description: dict[str, Any]) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        flush_to_disk(path)
        files[path.relative_to(folder).as_posix()] = {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}
    content = {**description, "files": files}
    text = json.dumps({**content, "sha256": sha256_of_object(content)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    flush_to_disk(folder / MANIFEST)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_to_disk(path)


def check_keys(saved: Any, known: Collection[str], what: str, optional: Collection[str] = ()) -> None:
    """ThreestepError that names the keys of `saved` that are neither `known` nor `optional`, or the known ones that it
    lacks. what: the part of a checkpoint that it is"""
    if not isinstance(saved, Mapping):
        raise ThreestepError(f"--resume: {what} is not an object with {', '.join(sorted(known))}; {_REMEDY}")
    if unknown := sorted(saved.keys() - {*known, *optional}):
        raise ThreestepError(
            f"--resume: {what} contains {', '.join(unknown)}, which this version does not know; {_REMEDY}"
        )
    if missing := sorted(set(known) - saved.keys()):
        raise ThreestepError(f"--resume: {what} lacks {', '.join(missing)}, which this version needs; {_REMEDY}")


def read_record(path: Path) -> Any:
    """The JSON in a file of a checkpoint. ThreestepError where it is none."""
    with as_written(str(path)):
        return parse_json(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def as_written(what: str) -> Iterator[None]:
    """Inside, ThreestepError for a record of another form, or a missing one."""
    try:
        yield
    except FileNotFoundError as problem:
        raise ThreestepError(f"--resume: there is no {what}; {_REMEDY}") from problem
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as problem:
        reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        raise ThreestepError(f"--resume: {what} has an unexpected form ({reason}); {_REMEDY}") from problem


def record_of(make: Callable[..., _Record], saved: Mapping[str, Any], what: str) -> _Record:
    """The record that a dataclass, or its inverse of `asdict`, makes of its fields in `saved`. ThreestepError that
    names a field that it does not know, or that is missing."""
    try:
        return make(**saved)
    except TypeError as problem:  # of the constructor: an unexpected keyword argument, a missing one
        reason = str(problem).partition("() ")[2] or problem
        raise ThreestepError(f"--resume: {what} has an unexpected form ({reason}); {_REMEDY}") from problem
