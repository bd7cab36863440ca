"""The tags of parallel thinking, by which a text is laid out as paths (`layout.parallel`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelTags:
    """The token ids of `<Parallel>`, `<Path>`, `</Path>` and `</Parallel>`; no two are the same."""

    open_block: int
    open_path: int
    close_path: int
    close_block: int
