"""The files of a model's image processor: what makes pixels of pictures stays with the model, unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

# As transformers 5.19 names them. A chat template is the tokenizer's.
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_files(name_or_path: str | Path) -> list[Path]:
    """Return those that a model's folder has; of a hub name, those in its local snapshot, downloaded where they are not
    there yet."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return [folder / name for name in _FILES if (folder / name).is_file()]
    from transformers.utils import cached_file

    found = [cached_file(str(name_or_path), name, _raise_exceptions_for_missing_entries=False) for name in _FILES]
    return [Path(path) for path in found if path is not None]


def copy_files(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        shutil.copyfile(file, folder / file.name)


def write_beside(write_more: Callable[[Path], None] | None, files: Iterable[Path], folder: Path) -> None:
    """Write what belongs into a model folder besides the model: files of its image processor, and what `write_more`
    writes."""
    copy_files(files, folder)
    if write_more is not None:
        write_more(folder)
