"""Folders that untrusted programs leave, and how they are removed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def remove_tree(path: str | Path) -> None:
    """Remove a folder that an untrusted program wrote: others stand in it on however many levels, and may be closed.
    What cannot be removed stays. Each folder in it is emptied into it, so that no path is long and nothing recurses."""
    with suppress(OSError), _opened_folder(path) as top:
        before = None
        while (names := os.listdir(top)) and names != before:
            before = names
            for name in names:
                _empty_into(top, name)
        os.rmdir(path)


def _empty_into(top: int, name: str) -> None:
    """Remove an entry of a folder, whose own entries it leaves to the folder."""
    with suppress(OSError):
        if not _is_folder(name, top):
            return os.unlink(name, dir_fd=top)
        with _opened_folder(name, top) as folder:
            for inner in os.listdir(folder):
                if _is_folder(inner, folder):
                    with _opened_folder(inner, folder):  # which may be moved then
                        os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
                else:
                    os.unlink(inner, dir_fd=folder)
        os.rmdir(name, dir_fd=top)


def _is_folder(name: str, within: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)


@contextmanager
def _opened_folder(path: str | Path, within: int | None = None) -> Iterator[int]:
    """A handle of a folder, which its owner may read and change from then on; no link is followed."""
    found = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    try:
        Path(f"/proc/self/fd/{found}").chmod(0o700)
        handle = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)
    try:
        yield handle
    finally:
        os.close(handle)
