"""A folder for a program that nobody trusts, which is gone afterwards, whatever stands in it.

`shutil.rmtree` goes into folders of folders by calling itself: it ends with an error on some thousand levels.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder among those for temporary files, which is removed at the end."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield Path(path)
    finally:
        remove_tree(path)


def remove_tree(path: str | Path) -> None:
    """Remove a folder, on however many levels others stand in it, and whatever its owner may do in them. What cannot be
    removed stays. Each folder within it is emptied into it, so that no path is long and nothing recurses."""
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
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        handle = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)
    try:
        yield handle
    finally:
        os.close(handle)
