"""Errors: a user's mistakes, in one clear sentence each; and those of the disk, whichever library meets them, as
OSErrors with the file's name. Knows nothing of datasets, models or engines."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.utils.base.credentials import redacted

_MOST_LISTED = 20


class ThreestepError(ValueError):
    """A user's mistake: the expected and the actual value, the place and the remedy, without credentials."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(redacted(str(sentence)))


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters; its type if it has none."""
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return redacted(line)[:200]  # in this order: half of a credential would not be known again


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the names closest to `name`, or "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    names = " or ".join(f"'{candidate}'" for candidate in close)
    return f"; did you mean {names}?" if close else ""


class Mistakes:
    """Collects every mistake of a configuration, so that all are reported at once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def require(self, condition: bool, sentence: str) -> None:
        """Add `sentence` unless `condition` holds."""
        if not condition:
            self.sentences.append(sentence)

    def require_one_of(self, flag: str, got: Any, choices: Iterable[str]) -> None:
        """Add a mistake if `got` is not in `choices`, with the nearest of them."""
        choices = list(choices)
        near = nearest_names(str(got), choices)
        self.require(got in choices, f"{flag} expects one of {', '.join(choices)}, got '{got}'{near}")

    def note(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `check`; if it raises a ThreestepError, add that and return None."""
        try:
            return check(*arguments)
        except ThreestepError as error:
            self.add(str(error))
            return None

    @property
    def different(self) -> list[str]:
        """The sentences, each once, with how often it was added."""
        counts = Counter(self.sentences)
        return [sentence if count == 1 else f"{sentence} ({count:,} times)" for sentence, count in counts.items()]

    def raise_if_any(self) -> None:
        """Raise one ThreestepError with the different sentences, one a line."""
        different = self.different
        if len(different) == 1:
            raise ThreestepError(different[0])
        if different:
            more = [f"and {len(different) - _MOST_LISTED:,} more"] if len(different) > _MOST_LISTED else []
            lines = "\n".join(f"  - {sentence}" for sentence in [*different[:_MOST_LISTED], *more])
            raise ThreestepError(f"{len(different):,} mistakes in the configuration:\n{lines}")


# What a file system answers, as apart from a network or a file that a program expects and does not find.
_OF_DISKS = frozenset(
    {
        errno.EACCES, errno.EBUSY, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
        errno.ENOLCK, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.ESTALE,
    }
)  # fmt: skip
# Rust's std::io::Error in words, as safetensors and tokenizers pass it on in their exceptions.
_RUST = re.compile(r"\(os error (\d+)\)")
# torch.save (2.13, caffe2/serialize/inline_container.cc) gives no number. "unexpected pos": a write fell short.
_TORCH = ("PytorchStreamWriter failed", "unexpected pos", "iostream error", "enforce fail at inline_container")


def disk_error_in(problem: BaseException) -> OSError | None:
    """The disk's error that `problem` is, or that a library in Rust or C++ wrapped; None if it is something else."""
    if isinstance(problem, OSError):
        return problem if problem.errno in _OF_DISKS else None
    message = str(problem)
    match = _RUST.search(message)
    if match is not None and int(match[1]) in _OF_DISKS:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if isinstance(problem, RuntimeError) and any(words in message for words in _TORCH):
        # The cause has the number, where torch.save writes to a file that Python opened.
        return disk_error_in(problem.__context__) if problem.__context__ else OSError(errno.EIO, "a write failed")
    return None


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Errors of the disk inside leave as OSErrors, with `path` where they name no file."""
    try:
        yield
    except Exception as problem:
        error = problem if isinstance(problem, OSError) else disk_error_in(problem)
        if error is None:
            raise
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        if error is problem:
            raise
        raise error from problem


def in_words(error: OSError) -> str:
    """ "FILE: No space left on device"; "a write: ..." where no file is named."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return f"{name or 'a write'}: {error.strerror or error}"


def disk_sentence(error: OSError) -> str:
    """The error message of a program that cannot continue without the disk."""
    return (
        f"cannot write to disk: {in_words(error)}; free space, or fix the disk or its permissions, and start again "
        "(--resume continues a run that has checkpoints)"
    )
