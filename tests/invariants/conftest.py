"""One launch a world size serves all invariant tests of an engine; the tests compare what it left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

HERE = Path(__file__).parent
LAUNCH_SECONDS = 600.0  # a minute on two idle cores


@pytest.fixture(scope="session", autouse=True)
def one_thread_here_too() -> Iterator[None]:
    """The references are tiny: on busy cores, more threads than one make them many times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """The folder of the tiny models."""
    from tests.invariants import tiny

    folder = tmp_path_factory.mktemp("models")
    tiny.save_models(folder)
    return folder


@pytest.fixture(scope="session")
def launched(request, tmp_path_factory, models) -> Callable[[str, int], tuple[Path, list[dict[str, Any]]]]:
    """launched(program, world_size) -> (its folder, the ranks' reports); each is run once a session. In the long form
    the program gets "long" as its last argument."""
    runs: dict[tuple[str, int], Any] = {}
    form = ["long"] if request.config.getoption("--long") else []

    def launch(program: str, world_size: int) -> tuple[Path, list[dict[str, Any]]]:
        key = (program, world_size)
        if key not in runs:
            out = tmp_path_factory.mktemp(f"{program}_{world_size}")
            try:
                runs[key] = out, run_ranks(HERE / f"{program}.py", world_size, [models, out, *form], LAUNCH_SECONDS)
            except AssertionError as failure:  # said once; the other tests of this launch point to it
                runs[key] = failure
                raise
        if isinstance(runs[key], AssertionError):
            pytest.fail(f"{program} on {world_size} ranks failed before: see the first test that asked for it")
        return runs[key]

    return launch
