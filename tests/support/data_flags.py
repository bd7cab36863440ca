"""DataArguments from flags by their names, whichever group they are in."""

from __future__ import annotations

import dataclasses
from typing import Any

from training.utils.data.build.arguments import DataArguments
from training.utils.data.sources.create import create_raw_dataset
from training.utils.data.sources.raw_dataset import PromptRawDataset


def data_flags(**given: Any) -> DataArguments:
    """The defaults, but for the flags given."""
    return with_flags(DataArguments(), **given)


def with_flags(data: DataArguments, **given: Any) -> DataArguments:
    """`data`, but for the flags given."""
    groups = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    changed = {}
    for name, group in groups.items():
        own = {flag: given.pop(flag) for flag in list(given) if hasattr(group, flag)}
        changed[name] = dataclasses.replace(group, **own)
    assert not given, f"no such data flags: {given}"
    return DataArguments(**changed)


def raw_dataset_of(name: str, data: DataArguments, seed: int) -> PromptRawDataset:
    return create_raw_dataset(name, data.source, data.cache.cache_dir, seed)
