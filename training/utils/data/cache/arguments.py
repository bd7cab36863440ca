"""The flags of the cache of tokenized data; cheap to import: `--help` reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class CacheArguments:
    """The cache of tokenized data, and its build."""

    topic: ClassVar[str] = "cache"
    may_change: ClassVar[bool] = True

    data_output_path: str = flag(
        os.path.join("~", ".cache", "threestep"),
        "Folder of the cache of tokenized data; runs, ranks and nodes can share it.",
        "folder",
    )
    num_workers: int | None = flag(
        None,
        "Processes that tokenize; default: one per core, and at most one per 1,000 rows. The result does not "
        "depend on it.",
        "processes >= 1",
    )
    rebuild_cache: bool = flag(False, "Tokenize the data again even if the cache has it.")

    @property
    def cache_dir(self) -> str:
        """`data_output_path` with ~ resolved."""
        return os.path.abspath(os.path.expanduser(self.data_output_path))
