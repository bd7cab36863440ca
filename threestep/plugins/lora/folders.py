"""Adapters in PEFT's format: which folder or hub name is one, and of which base model.

Imports no library and reads no weight; `merging` puts them on a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_json

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"  # PEFT's names
_DESCRIPTION = "weights.json"  # beside CONFIG in a checkpoint, which describes a model and holds no weights


@dataclass(frozen=True)
class AdapterFolder:
    """name: as it was given. base: the folder or hub name of the model that it adapts. settings: its adapter_config."""

    name: str
    folder: Path
    base: str
    settings: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def settings_file(self) -> Path:
        return self.folder / CONFIG

    @property
    def base_in_words(self) -> str:
        where = "" if Path(self.base).is_dir() else " (not a folder here or in the adapter's folder)"
        return f"base of the adapter '{self.name}'{where}"


def find_folder(name_or_path: str) -> AdapterFolder | None:
    """Return the adapter in a folder or under a hub name; None if it is a model. ThreestepError if its settings name no
    base that there may be, or its weights are not safetensors."""
    if Path(name_or_path).is_dir():
        return adapter_in(Path(name_or_path))
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors", "gated_repo")  # the loader of the model explains errors
    try:
        for file in (CONFIG, WEIGHTS):
            cached = cached_file(name_or_path, file, **{f"_raise_exceptions_for_{what}": False for what in quiet})
            if cached is None and file == CONFIG:
                return None
    except OSError:
        return None
    return adapter_in(Path(str(cached or "")).parent, name_or_path)


def adapter_in(folder: Path, name: str | None = None) -> AdapterFolder | None:
    """See `find_folder`; of a folder. name: that it goes by, its path by default."""
    if not (folder / CONFIG).is_file() or (folder / _DESCRIPTION).is_file():
        return None
    name = name or str(folder)
    try:
        settings = dict(parse_json((folder / CONFIG).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as problem:
        raise ThreestepError(
            f"'{folder / CONFIG}' is not a JSON object ({problem}); download or copy the adapter again"
        ) from problem
    if not (folder / WEIGHTS).is_file():
        raise ThreestepError(_without_weights(folder, name))
    return AdapterFolder(name, folder, _base(folder, name, settings), settings)


def _without_weights(folder: Path, name: str) -> str:
    if not (folder / PICKLE).is_file():
        return f"'{name}' has PEFT's {CONFIG} but no {WEIGHTS}; save or download the adapter again"
    convert = (
        f"import torch, safetensors.torch as s; s.save_file({{name: tensor.contiguous() for name, tensor in torch.load("
        f"'{folder / PICKLE}', map_location='cpu', weights_only=True).items()}}, '{folder / WEIGHTS}')"
    )
    return (
        f"'{name}' has pickled adapter weights ({PICKLE}), which can run code when loaded, instead of {WEIGHTS}; if "
        f'you trust them, convert them: python -c "{convert}"'
    )


def _base(folder: Path, name: str, settings: dict[str, Any]) -> str:
    """The base's folder, as seen from the working directory (PEFT's way) or from the adapter's; else its hub name."""
    base = settings.get("base_model_name_or_path")
    write = f"set base_model_name_or_path in '{folder / CONFIG}' to the "
    if not isinstance(base, str) or not base:
        raise ThreestepError(f"'{name}' is an adapter, but its base model is {base!r}; {write}model it was trained on")
    for place in (Path(base).expanduser(), (folder / base).resolve()):
        if place.is_dir():
            if (place / CONFIG).is_file():
                raise ThreestepError(
                    f"'{name}' is an adapter of '{place}', which is an adapter too; first merge that one into its "
                    f"own folder (PEFT: merge_and_unload), then {write}merged one"
                )
            return str(place)
    if Path(base).is_absolute() or base.startswith((".", "~")) or base.count("/") > 1:
        raise ThreestepError(
            f"'{name}' is an adapter of the model '{base}', but there is no such folder in the working directory "
            f"({Path.cwd()}) or next to the adapter; {write}model it was trained on"
        )
    if settings.get("revision") not in (None, "", "main"):
        raise ThreestepError(
            f"'{name}' is an adapter of revision '{settings['revision']}' of '{base}', but only the main revision is "
            f"read from the hub; download that revision, and {write}downloaded folder"
        )
    return base
