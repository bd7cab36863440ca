"""The files of shards: which are finished, and which are removed. Knows nothing of their content.

A shard is an Arrow file and a JSON file, which is written last and holds its entry: the fields of a split's in the
manifest, with the checksum of the Arrow file. The media of its rows, if they have some, are in a third file. All are
in the subfolder `shards` of the folder that is being built, whose name holds the fingerprint of the build.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from typing import Any

from training.utils.base.storage import read_json_object, sha256_of, write_json
from training.utils.contracts.media_names import STORED_MEDIA

_FOLDER = "shards"


def shard_path(folder: str, split: str, begin: int, end: int) -> str:
    """The Arrow file of a shard of the folder that is being built."""
    return os.path.join(folder, _FOLDER, f"{split}-{begin:09d}-{end:09d}.arrow")


def make_shards_folder(folder: str) -> None:
    os.makedirs(os.path.join(folder, _FOLDER), exist_ok=True)


def media_path(path: str) -> str:
    """The media of a shard."""
    return path.removesuffix(".arrow") + f".{STORED_MEDIA}"


def finish_shard(path: str, written: str, entry: dict[str, Any]) -> None:
    """Give the file `written` the shard's name, and that of its media, then mark it as finished."""
    if entry.get(STORED_MEDIA):
        os.replace(media_path(path) + ".part", media_path(path))
    os.replace(written, path)
    about = _about(path)
    write_json(about + ".part", {"key": _key(path), **entry})
    os.replace(about + ".part", about)


def finished_shard(path: str) -> dict[str, Any] | None:
    """The shard's entry if the shard exists, belongs to this build and has its checksums."""
    entry = read_json_object(_about(path))
    try:
        if not entry or entry["key"] != _key(path) or entry["sha256"] != sha256_of(path):
            return None
        media = entry.get(STORED_MEDIA)
        return entry if not media or media["sha256"] == sha256_of(media_path(path)) else None
    except (OSError, KeyError):
        return None


def keep_shards(folder: str, paths: Collection[str]) -> None:
    """Remove all files from the folder of the shards except those of these shards."""
    stays = {*paths, *map(_about, paths), *map(media_path, paths)}
    shards = os.path.join(folder, _FOLDER)
    for name in os.listdir(shards):
        path = os.path.join(shards, name)
        if path not in stays:
            os.remove(path)


def keep_finished_shards(folder: str) -> int:
    """Remove everything from a folder that is being built except finished shards; returns how many those are."""
    for name in os.listdir(folder):
        if name != _FOLDER:
            os.remove(os.path.join(folder, name))
    shards = os.path.join(folder, _FOLDER)
    if not os.path.isdir(shards):
        return 0
    paths = [os.path.join(shards, name) for name in os.listdir(shards) if name.endswith(".arrow")]
    finished = [path for path in paths if os.path.exists(_about(path))]
    keep_shards(folder, finished)
    return len(finished)


def drop_shards(folder: str) -> None:
    """Remove the shards of a folder whose splits are joined."""
    shutil.rmtree(os.path.join(folder, _FOLDER), ignore_errors=True)


def _about(path: str) -> str:
    return path.removesuffix(".arrow") + ".json"


def _key(path: str) -> str:
    """The name of the folder that is being built, which a shard belongs to."""
    return os.path.basename(os.path.dirname(os.path.dirname(path)))
