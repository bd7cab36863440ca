"""Runs a script on several ranks of this machine and brings home what each rank reports.

    RESULTS = run_ranks('''
    import torch.distributed as dist
    from tests.distributed.launch import report
    dist.init_process_group("gloo")
    report({"rank": dist.get_rank()})
    dist.destroy_process_group()
    ''', world_size=2)

Every rank is a process with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as a launcher sets
them, and one thread, forked where that may be (tests/support/forked_programs.py). Where one fails, or time runs
out, all are ended and the test fails with what they said.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked_programs import ON_CPU, start_python, wait_for
from training.utils.run.launch import free_port

ROOT = Path(__file__).parents[2]
_RESULT_VARIABLE = "THREESTEP_TEST_RESULT"
_OUTPUT_CHARACTERS = 6000


def report(result: Mapping[str, Any]) -> None:
    """Hand `result` (JSON values only) from a rank to the test that called run_ranks."""
    Path(os.environ[_RESULT_VARIABLE]).write_text(json.dumps(dict(result)), encoding="utf-8")


def run_ranks(
    script: str | Path,
    world_size: int = 2,
    args: Sequence[object] = (),
    timeout_seconds: float = 180.0,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `script` (a file's path, or Python source) on `world_size` ranks; return their reports by rank.

    A rank that reports nothing gives an empty dict. Raises AssertionError, with every rank's output, where a
    rank ends with another code than 0 or `timeout_seconds` pass.
    """
    with tempfile.TemporaryDirectory(prefix="threestep_ranks_") as folder:
        path = script if isinstance(script, Path) else Path(folder, "script.py")
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script), encoding="utf-8")
        outputs = [Path(folder, f"output_{rank}.txt") for rank in range(world_size)]
        results = [Path(folder, f"result_{rank}.json") for rank in range(world_size)]
        shared = {
            **os.environ,
            **ON_CPU,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            **(environment or {}),
            **{"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        }
        words = [str(path), *map(str, args)]
        programs = []
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _RESULT_VARIABLE: str(results[rank])}
            programs.append(start_python(words, {**shared, **own}, outputs[rank], outputs[rank]))
        try:
            failed = wait_for(programs, timeout_seconds)
        except subprocess.TimeoutExpired:
            problem = f"the ranks were not done after {timeout_seconds:.0f} seconds"
        else:
            problem = "" if failed is None else f"rank {failed} ended with code {programs[failed].returncode}"
        if problem:
            said = [_said(rank, path) for rank, path in enumerate(outputs)]
            raise AssertionError("\n".join([problem, *said]))
        return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in results]


def _said(rank: int, path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return f"--- rank {rank} said:\n{text[-_OUTPUT_CHARACTERS:]}"
