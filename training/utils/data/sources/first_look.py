"""A look at the data before libraries, models and ranks: what it would refuse after a minute it refuses in seconds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.base.hub import check_hub
from training.utils.data.files.addresses import is_remote
from training.utils.data.files.readers import STORES, files_of, split_reader
from training.utils.data.files.stored import check_stored
from training.utils.data.sources.create import columns_of
from training.utils.data.sources.file_dataset import FileDataset
from training.utils.data.sources.registry import find_dataset

if TYPE_CHECKING:
    from training.utils.data.sources.arguments import SourceArguments

POINTER = "threestep inspect with the same data flags shows how the rows are read"
_MOST_BYTES = 32 << 20  # read in about a second; larger files are read once, by the build


def look_at_data(phase: int, source: SourceArguments) -> None:
    """ThreestepError for local files that cannot serve a phase, and for a dataset on the hub that is out of reach."""
    names = [*source.data_path, *(source.sft_only_data_path if phase == 1 else [])]
    for name in names:
        dataset = find_dataset(name)
        if not isinstance(dataset, str):
            if dataset.is_on_hub and not os.path.exists(name):
                check_hub(f"--data_path: '{name}'", "datasets", name)
        elif dataset in STORES:
            check_stored(dataset, name.partition(":")[2], "data_path", reach=True)
        elif _is_small(name):
            try:
                FileDataset(name, columns_of(source), source.data_format, None).check_phase(phase)
            except ThreestepError as refusal:
                raise ThreestepError(f"{refusal}; {POINTER}") from refusal


def _is_small(name: str) -> bool:
    """True for local files that are few bytes together."""
    reader, address = split_reader(name) or ("", "")
    if is_remote(address):
        return False
    files = files_of(reader, address, "data_path")
    return sum(os.path.getsize(file) for file in files) <= _MOST_BYTES
