"""The flags of the cache of tokenized data; cheap to import: `--help` reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from training.utils.run.flags import flag


@dataclass
class CacheArguments:
    """Where tokenized data is cached, and how it is built."""

    data_output_path: str = flag(
        os.path.join("~", ".cache", "threestep"),
        "Folder of the cache of tokenized data; runs, ranks and nodes may share it.",
    )
    num_workers: int | None = flag(
        None,
        "Processes that tokenize; default: one per core that this process may use, and at most one per "
        "1,000 rows. The result is the same for any number.",
        least=1,
    )
    rebuild_cache: bool = flag(False, "Build the tokenized data even where the cache has it.")

    @property
    def cache_dir(self) -> str:
        """`data_output_path` with ~ resolved."""
        return os.path.abspath(os.path.expanduser(self.data_output_path))
