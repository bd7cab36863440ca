"""The files of an address: a local path, a glob, a folder of shards or an fsspec address (`s3://`, `memory://`, ...).
In and below a folder hidden ones are left out, and a real file is listed once, whatever links to it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from training.utils.base.errors import ThreestepError
from training.utils.data.files.content import COMPRESSED, is_remote, reading

_HIDES = (".", "_")  # `_SUCCESS`, `_temporary`, `__MACOSX`: pyarrow and Spark pass over both, too
_OF_DATASETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # beside its rows
_SHOWN = 3


class PassedOver:
    """Files below a folder that are not listed: hidden ones, and further names of one that is listed."""

    def __init__(self) -> None:
        self.hidden: list[str] = []
        self.repeated: list[str] = []

    @property
    def sentences(self) -> list[str]:
        """One for each reason, with a count and the first names."""
        said = []
        if self.hidden:
            said.append(f"not read: {_counted(self.hidden, 'hidden file')}; to read them, name the folder they are in")
        if self.repeated:
            said.append(f"read once: {_counted(self.repeated, 'link')} to files that are read under another name")
        return said


def _counted(names: Sequence[str], what: str) -> str:
    shown = ", ".join([*sorted(names)[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
    return f"{len(names):,} {what}{'s' if len(names) > 1 else ''} ({shown})"


def check_address(address: str, flag: str) -> None:
    """Raise ThreestepError where a local address names nothing; remote ones are not checked."""
    if not is_remote(address):
        _local_matches(address, flag, PassedOver())


def find_files(address: str, suffixes: Sequence[str], flag: str, passed: PassedOver | None = None) -> list[str]:
    """The files of an address, sorted: itself, the matches of a glob, or the files in and below a folder that end in
    one of `suffixes` (or in one of them and .gz, .bz2, .xz, .zst).

    flag: gave the address, for errors. passed: gets the names of files that are not listed.
    """
    passed = PassedOver() if passed is None else passed
    endings = tuple(suffix + more for suffix in suffixes for more in ("", *COMPRESSED))
    if is_remote(address):
        return _find_remote(address, endings, flag, passed)
    matches = _local_matches(address, flag, passed)
    if len(matches) == 1 and os.path.isdir(matches[0]):
        check_versions(matches[0], flag)
        found = list_folder(matches[0], lambda name: name.endswith(endings), passed)
        _check_found(found, endings, address, flag=flag, passed=passed)
        return found
    if len(matches) == 1:
        return matches
    return each_once(matches, folder_of(address) or ".", passed)


def _local_matches(address: str, flag: str, passed: PassedOver) -> list[str]:
    path = os.path.expanduser(address)
    if os.path.exists(path):
        return [path]
    if "**" in path.split("/"):
        matches = list_pattern(path, folder_of(path) or ".", passed)
    else:
        matches = sorted(match for match in glob.glob(path) if os.path.isfile(match))
    if not matches:
        what = "matches no file" if glob.has_magic(path) else "does not exist"
        raise ThreestepError(f"--{flag}: '{address}' {what}; the current folder is '{os.getcwd()}'")
    return matches


def _find_remote(address: str, endings: tuple[str, ...], flag: str, passed: PassedOver) -> list[str]:
    with reading(address):
        import fsspec

        if "::" in address:  # one file inside another, such as zip://rows.csv::s3://bucket/rows.zip
            return [address]
        files, path = fsspec.core.url_to_fs(address)
        if glob.has_magic(path):
            paths = sorted(files.glob(path))
            if "**" in path:
                paths = without_hidden(paths, path.partition("**")[0], passed)
        elif files.isdir(path):
            found = [name for name in files.find(path) if name.endswith(endings) and holds_rows(name)]
            paths = sorted(without_hidden(found, path.rstrip("/"), passed))
            _check_found(paths, endings, address, flag=flag, passed=passed)
        else:
            paths = [path] if files.exists(path) else []
        if not paths:
            raise ThreestepError(f"--{flag}: '{address}' matches no file")
        return [files.unstrip_protocol(name) for name in paths]


def _check_found(files: Sequence[str], endings: Sequence[str], folder: str, *, flag: str, passed: PassedOver) -> None:
    if not files:
        suffixes = [ending for ending in endings if not ending.endswith(COMPRESSED)]
        but = f", except {len(passed.hidden)} hidden; name their folder to read them" if passed.hidden else ""
        raise ThreestepError(f"--{flag}: the folder '{folder}' contains no file ending in {' or '.join(suffixes)}{but}")


def folder_of(address: str) -> str | None:
    """The folder that an address names, or that its files are in (of a glob, the one before the first pattern); None of
    a remote address."""
    if is_remote(address):
        return None
    folder = os.path.expanduser(address)
    while glob.has_magic(folder) and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder if os.path.isdir(folder) else os.path.dirname(folder) or "."


def list_folder(folder: str, wanted: Callable[[str], bool], passed: PassedOver) -> list[str]:
    """The files below a local folder whose names are `wanted`, sorted. Links to files and folders are followed, but
    not to a folder that the link is in."""
    found: list[str] = []
    entered: set[str] = set()
    pending = [folder]
    while pending:  # folders first, then those that links in them lead to
        links: list[str] = []
        for start in pending:
            for parent, folders, names in os.walk(start):
                if os.path.realpath(parent) in entered:
                    passed.repeated.append(os.path.relpath(parent, folder))
                    folders.clear()
                    continue
                entered.add(os.path.realpath(parent))
                for hidden in [name for name in folders if name.startswith(_HIDES)]:
                    folders.remove(hidden)
                    passed.hidden += _below(os.path.join(parent, hidden), folder, wanted)
                inside = [os.path.join(parent, name) for name in folders]
                links += [path for path in inside if os.path.islink(path) and not _leads_back(path, folder, passed)]
                found += [os.path.join(parent, name) for name in names]
        pending = sorted(links)
    visible = without_hidden([path for path in found if wanted(path)], folder, passed)
    return each_once([path for path in visible if holds_rows(path) and not _is_special(path)], folder, passed)


def list_pattern(pattern: str, folder: str, passed: PassedOver) -> list[str]:
    """The files below `folder` that a pattern with ** matches, as `list_folder` walks it: glob does not end where links
    go in a circle."""
    wanted = os.path.relpath(pattern, folder).split(os.sep)
    return list_folder(folder, lambda path: _matches(os.path.relpath(path, folder).split(os.sep), wanted), passed)


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[begin:], pattern[1:]) for begin in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _below(hidden: str, folder: str, wanted: Callable[[str], bool]) -> list[str]:
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(hidden) for name in names)
    return [os.path.relpath(path, folder) for path in paths if wanted(path)]


def _leads_back(link: str, folder: str, passed: PassedOver) -> bool:
    """True for a link to a folder that it is in: to follow it would list that folder's other content."""
    to, place = os.path.realpath(link), os.path.realpath(os.path.dirname(link))
    if leads_back := os.path.commonpath([to, place]) == to:
        passed.repeated.append(os.path.relpath(link, folder))
    return leads_back


def _is_special(path: str) -> bool:
    """True for a pipe, a socket or a device, which would be waited for."""
    return os.path.exists(path) and not os.path.isfile(path)


def holds_rows(path: str) -> bool:
    """False for what `save_to_disk` writes beside rows: sentences about them, and results of maps."""
    name = os.path.basename(path)
    return name not in _OF_DATASETS and not (name.startswith("cache-") and name.endswith(".arrow"))


def without_hidden(paths: Iterable[str], folder: str, passed: PassedOver) -> list[str]:
    """The paths with no hidden name behind that of the folder."""
    visible = []
    for path in paths:
        inside = os.path.relpath(path, folder) if path.startswith(folder) else path
        if any(part.startswith(_HIDES) for part in inside.split("/")):
            passed.hidden.append(inside)
        else:
            visible.append(path)
    return visible


def each_once(paths: Sequence[str], folder: str, passed: PassedOver) -> list[str]:
    """Each real file once, sorted: under its real name, or if that is elsewhere under the first. ThreestepError for a
    link to nothing."""
    base = os.path.realpath(folder)

    def preferred(path: str) -> tuple[bool, str]:
        return os.path.realpath(path) != os.path.join(base, os.path.relpath(path, folder)), path

    listed: dict[tuple[int, int], str] = {}
    for path in sorted(paths, key=preferred):
        try:
            state = os.stat(path)
        except OSError as error:
            raise ThreestepError(
                f"'{path}' is a link to '{os.path.realpath(path)}', which does not exist; fetch that file, or remove "
                "the link"
            ) from error
        if listed.setdefault((state.st_dev, state.st_ino), path) != path:
            passed.repeated.append(os.path.relpath(path, folder))
    return sorted(listed.values())


def check_versions(folder: str, flag: str) -> None:
    """Raise ThreestepError for a folder that keeps old rows beside present ones."""
    if os.path.isdir(os.path.join(folder, "_delta_log")):
        raise ThreestepError(
            f"--{flag}: the folder '{folder}' is a Delta table, whose files also hold rows that were replaced or "
            "deleted; write its current rows to Parquet, and pass those"
        )
    snapshots = os.path.join(folder, "snapshots")  # of huggingface_hub's cache
    if os.path.isdir(os.path.join(folder, "blobs")) and os.path.isdir(snapshots) and len(os.listdir(snapshots)) > 1:
        raise ThreestepError(
            f"--{flag}: the folder '{folder}' holds {len(os.listdir(snapshots))} versions of a dataset; pass one, "
            f"such as '{os.path.join(snapshots, sorted(os.listdir(snapshots))[0])}'"
        )
