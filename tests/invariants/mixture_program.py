"""Launched on one or two ranks: engine_program's mixtures of experts, in a launch of their own so that none takes long.

Arguments and report: as engine_program's.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.invariants.engine_program import mixture_cases, run_case, wanted
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group() as ranks:
        cases = wanted(mixture_cases(ranks.world_size), ranks.world_size, is_long)
        report({case.name: run_case(case, models, out, ranks) for case in cases})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
