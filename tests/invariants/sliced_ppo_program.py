"""Launched on two ranks: ppo_program's whole iterations, GRPO and paths with each row over both ranks.

Arguments and report: as ppo_program's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

SIZE = 2
ORDINARY: dict[str, Collection[str]] = {"iterations": ("3_packed",)}
EVERY: dict[str, Collection[str]] = {
    "iterations": ("0", "2", "3", "0_packed", "3_packed"),
    "grpo": ("0_two_epochs", "3_packed"),
    "paths": ("0_packed", "0_padded", "3_packed"),
    "tries": ("0_padded", "2_shared", "3_shared"),
    "lora": ("0", "3"),
}


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.invariants.ppo_program import SECTIONS
    from training.utils.engine.ranks.startup import sharing_rows, started_process_group

    with started_process_group() as ranks:
        sharing = sharing_rows(ranks, SIZE)
        cases = EVERY if is_long else ORDINARY
        report({name: SECTIONS[name](models, out, sharing, cases[name]) for name in cases})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
