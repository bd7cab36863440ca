"""Launched on one or two ranks: engine_program's mixtures of experts, in a launch of their own so that none takes long.

Arguments: as engine_program's, "long" for each at every ZeRO stage. Report: as engine_program's.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.invariants.engine_program import mixture_cases, run_case
    from training.utils.engine.startup import started_process_group

    with started_process_group() as ranks:
        report({case.name: run_case(case, models, out, ranks) for case in mixture_cases(ranks.world_size, is_long)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
