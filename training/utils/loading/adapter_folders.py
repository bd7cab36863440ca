"""Adapters in folders: which folder or hub name holds some, and of which base model. Plugins read them
(`AdapterEntry`); without one such a folder is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added, missing, missing_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings
    from training.utils.plugins.plugin import AdapterEntry

_TABLE = "adapters"


class AdapterPlan(Protocol):
    """Adapters that fit their base. supplied: names of the base's tensors that they bring."""

    @property
    def supplied(self) -> Collection[str]: ...

    def put_on(self, model: PreTrainedModel, settings: ModelSettings) -> None:
        """Merge them into `model`, or have it train them on. A collective under ZeRO-3."""


class GivenAdapter(Protocol):
    """Adapters that are given as a model.

    name: as they were given. base: the folder or hub name of the model that they adapt. base_in_words: that, for errors
    settings_file: it names the base. weights: a safetensors file
    """

    @property
    def name(self) -> str: ...
    @property
    def base(self) -> str: ...
    @property
    def base_in_words(self) -> str: ...
    @property
    def settings_file(self) -> Path: ...
    @property
    def weights(self) -> Path: ...

    def planned(self, make_empty: Callable[[], PreTrainedModel], settings: ModelSettings) -> AdapterPlan:
        """Compare them with their base, before a weight is read. make_empty: returns the base on the meta device.
        ThreestepError if they do not fit."""


def find_adapter(name_or_path: str) -> GivenAdapter | None:
    """Return the adapters in a folder or under a hub name; None if it is a model. ThreestepError if they cannot be
    read."""
    for file in missing(_TABLE):
        if Path(name_or_path, file).is_file() and not Path(name_or_path, "weights.json").is_file():
            raise ThreestepError(f"'{name_or_path}' holds {file}, and no model; {missing_plugin(_TABLE, file)}")
    entries: dict[str, AdapterEntry] = added(_TABLE, ())
    found = (named_object(entry.find)(name_or_path) for entry in entries.values())
    return next((adapter for adapter in found if adapter is not None), None)


def model_of(name_or_path: str) -> str:
    """Return the base of an adapter, or the name or path of a model."""
    adapter = find_adapter(name_or_path)
    return name_or_path if adapter is None else adapter.base
