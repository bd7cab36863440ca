"""Pictures in rows that a call holds in memory, as files beside those rows. Their values become paths."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import replace_file
from training.utils.data.formats.media import IMAGE_COLUMNS, IMAGE_PARTS

FOLDER = "pictures"
_ADDRESSES = ("https://", "http://", "data:")
_HOLD_A_PICTURE = ("bytes", "path", "image", "image_url", "url", "source")  # keys of structs and of parts


class PictureFolder:
    """Writes the pictures of rows, each once, to a folder that is made for the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def without_pictures(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The row with a path in place of each picture: PIL images; and in a column of images or an image part of
        a message, also bytes and paths of files. where: of the row, for errors."""
        return {
            column: self._read(value, f"{where}['{column}']", is_picture=column in IMAGE_COLUMNS)
            for column, value in row.items()
        }

    def _read(self, value: Any, where: str, is_picture: bool) -> Any:
        if isinstance(value, Mapping):
            is_part = value.get("type") in IMAGE_PARTS
            return {
                name: self._read(inner, where, (is_picture or is_part) and name in _HOLD_A_PICTURE)
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._read(inner, where, is_picture) for inner in value]
        if type(value).__module__.partition(".")[0] == "PIL":
            from training.utils.setup.media import media_kind

            return self._written(media_kind().encoded(value, where))
        if not is_picture:
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._written(bytes(value))
        if isinstance(value, (str, os.PathLike)) and not str(value).lstrip().lower().startswith(_ADDRESSES):
            return self._copied(Path(value).expanduser(), where)
        return value

    def _copied(self, path: Path, where: str) -> str:
        try:
            return self._written(path.read_bytes())
        except OSError as problem:
            raise ThreestepError(
                f"{where} expects an image (bytes, a PIL image or a file path), got '{path}', which cannot be read "
                f"({problem.strerror}); relative paths are resolved from the current folder, {Path.cwd()}"
            ) from problem

    def _written(self, content: bytes) -> str:
        name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:32]}"
        path = self._folder.parent / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        return name
