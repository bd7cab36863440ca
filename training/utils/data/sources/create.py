"""Raw datasets, created from the flags that name them."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from training.utils.data.sources.file_dataset import FileDataset
from training.utils.data.sources.formats.formats import FileColumns
from training.utils.data.sources.registry import find_dataset, load_dataset_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from training.utils.data.sources.arguments import SourceArguments
    from training.utils.data.sources.raw_dataset import PromptRawDataset


def create_raw_dataset(
    name: str, source: SourceArguments, cache_dir: str, seed: int, *, local_rank: int = 0
) -> PromptRawDataset:
    """Load the dataset modules, then create the raw dataset of one `--data_path` entry."""
    for module in source.dataset_module:
        load_dataset_module(module)
    dataset = find_dataset(name)
    if isinstance(dataset, str):
        return FileDataset(name, columns_of(source), source.data_format, cache_dir)
    return dataset(cache_dir, seed, local_rank, name)


def columns_of(source: SourceArguments) -> FileColumns:
    """The columns that the flags name: --prompt_column and so on."""
    return FileColumns(**{field.name: getattr(source, f"{field.name}_column") for field in fields(FileColumns)})


_OF_ONE_KIND = ("margin", "reference")  # roles of columns that only one kind of rows reads; all read the others


def columns_for(alone: Sequence[str], source: SourceArguments) -> dict[str, str | None]:
    """The columns that the flags name and a kind of rows reads, by role: its build depends on them. alone: those of one
    kind that it reads."""
    named = asdict(columns_of(source))
    return {role: column for role, column in named.items() if role in alone or role not in _OF_ONE_KIND}
