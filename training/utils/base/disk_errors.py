"""Errors of the disk, whichever library meets them: as OSErrors with the file's name, and in words."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        f"the disk refuses {in_words(error)}; free space, or mend the disk or its permissions, and start again "
        "(--resume continues a run that has checkpoints)"
    )
