"""DataArguments from flags by their names, whichever group they are in."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from training.utils.data.arguments import DataArguments
from training.utils.data.file_dataset import create_raw_dataset
from training.utils.data.raw_dataset import PromptRawDataset

_Data = TypeVar("_Data", bound=DataArguments)


def data_flags(**given: Any) -> DataArguments:
    """The defaults, but for the flags given."""
    return with_flags(DataArguments(), **given)


def with_flags(data: _Data, **given: Any) -> _Data:
    changed: _Data = _changed(data, given)
    assert not given, f"no such data flags: {given}"
    return changed


def _changed(group: Any, given: dict[str, Any]) -> Any:
    """The group, or the groups in it, with those of the flags given that it has, which are taken out."""
    own = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            own[field.name] = _changed(value, given)
        elif field.name in given:
            own[field.name] = given.pop(field.name)
    return dataclasses.replace(group, **own)


def raw_dataset_of(name: str, data: DataArguments, seed: int) -> PromptRawDataset:
    return create_raw_dataset(name, data.source, data.cache.cache_dir, seed)
