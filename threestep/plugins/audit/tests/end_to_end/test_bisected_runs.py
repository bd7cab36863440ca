"""Two runs with one planted difference end at its very place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from threestep.plugins.audit.bisect.bisect import bisect
from threestep.plugins.audit.bisect.digest_files import read_digests
from threestep.plugins.audit.bisect.text import verdict
from threestep.plugins.audit.tests.bisected_runs import PAIRS, PROGRAMS, Bench, Pair, is_there, starter

pytestmark = pytest.mark.timeout(900)  # on a busy machine
SHORT = "sft token"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORT else [pytest.mark.long]) for name in PAIRS]
)
def test_a_pair_ends_at_its_place(tmp_path: Path, name: str):
    pair = PAIRS[name]
    found = Bench(tmp_path).bisected(name, pair)
    assert is_there(found, pair.expected), verdict(found)
    assert not found.notes


def run_there(module: str, *flags: str) -> bool:
    """Run a program where the pretended GPU is."""
    import importlib

    importlib.import_module(module).main(flags)
    return True


class Ended:
    """A program that has run on the pretended GPU."""

    def __init__(self, on_cuda: Callable[..., Any], words: Sequence[str]) -> None:
        on_cuda(run_there, *words)

    def poll(self) -> int | None:
        return 0

    def stop(self) -> None:
        pass


@pytest.mark.long
def test_a_run_on_a_cpu_and_one_on_a_gpu(on_cuda, tmp_path: Path):
    """The weights, the data and the forward are the same on both; the planted flag is the first difference."""
    bench, pair = Bench(tmp_path), Pair("sft", "", (1, "forward", "loss"), b="--digests true --z_loss_coef 1e-3")
    on_cuda(run_there, PROGRAMS["sft"], *bench.flags(pair, 1, tmp_path / "cuda"))
    runs = [read_digests(folder) for folder in (bench.run(pair, 0, "cpu"), tmp_path / "cuda")]
    starts = [starter(""), lambda words, ranks, output: Ended(on_cuda, words)]
    found = bisect(*runs, tmp_path / "again", starts)
    assert is_there(found, pair.expected), verdict(found)
    assert not found.notes
    assert "cpu, 1 thread and cuda, 1 thread, a pretended GPU" in found.comparison.of_rounding
    assert found.comparison.first is not None and found.comparison.first.before < 1e-6
