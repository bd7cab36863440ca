"""What a folder that is given as a model holds, before any library is imported."""

from __future__ import annotations

from pathlib import Path

from training.utils.run.errors import ThreestepError


def check_model_folder(name_or_path: str) -> None:
    """ThreestepError if a path holds no model; hub names pass. Programs check before they import a library."""
    path = Path(name_or_path)
    looks_local = path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1
    if looks_local and not path.is_dir():
        raise ThreestepError(f"the model folder '{name_or_path}' does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ThreestepError(f"the folder '{name_or_path}' holds no config.json, so it is not a model folder")
