"""Launched on two or four ranks: ppo_program's whole iterations, GRPO, mixtures and paths with each row over several
ranks. Four ranks are one group of four and two of two.

Arguments: as ppo_program's. Report: as its, by how many ranks share a row; so are the folders of weights.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ORDINARY: dict[str, Collection[str]] = {"iterations": ("3_packed",)}
EVERY: dict[str, Collection[str]] = {
    "iterations": ("0", "2", "3", "0_packed", "3_packed"),
    "mixtures": ("1_padded", "0_packed", "3_packed"),
    "grpo": ("0_two_epochs", "3_packed"),
    "paths": ("0_packed", "0_padded", "3_packed"),
    "tries": ("0_padded", "2_shared", "3_shared"),
    "lora": ("0", "3"),
}
OF_FOUR: dict[str, Collection[str]] = {**EVERY, "iterations": ("3_packed", "0"), "mixtures": ("3_packed",)}
# By ranks and those that share a row.
CASES = {(2, 2): EVERY, (4, 4): OF_FOUR, (4, 2): {"iterations": ("3_packed",), "grpo": ("3_packed",)}}


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.invariants.ppo_program import SECTIONS
    from tests.support.shared_rows import sharing_rows
    from training.utils.engine.ranks.startup import started_process_group

    found: dict[str, dict[str, Any]] = {}
    with started_process_group() as ranks:
        for (world_size, size), cases in CASES.items():
            if world_size != ranks.world_size:
                continue
            folder = out / str(size)
            folder.mkdir(exist_ok=True)
            sharing, wanted = sharing_rows(ranks, size), cases if is_long else ORDINARY
            found[str(size)] = {name: SECTIONS[name](models, folder, sharing, wanted[name]) for name in wanted}
    report(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
