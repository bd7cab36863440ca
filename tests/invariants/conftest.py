"""One launch a world size serves all invariant tests of an engine; the tests compare what it left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

HERE = Path(__file__).parent
LAUNCH_SECONDS, LONG_SECONDS = 600.0, 3000.0  # ordinary launches take a minute on two idle cores
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


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
def launched(request, tmp_path_factory, models) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """launched(what, world_size, **asked) -> (its folder, the ranks' reports); each is run once a session. what: see
    launched.py."""
    runs: dict[Any, Any] = {}
    form = "long" if request.config.getoption("--long") else "ordinary"

    def launch(what: str, world_size: int, **asked: Any) -> tuple[Path, list[dict[str, Any]]]:
        key = (what, world_size, json.dumps(asked))
        if key not in runs:
            out = tmp_path_factory.mktemp(f"{what}_{world_size}")
            words = [what, models, out, form, json.dumps(asked)]
            seconds = LAUNCH_SECONDS if form == "ordinary" else LONG_SECONDS
            try:
                runs[key] = out, run_ranks(HERE / "launched.py", world_size, words, seconds, ON_CPU)
            except AssertionError as failure:  # said once; the other tests of this launch point to it
                runs[key] = failure
                raise
        if isinstance(runs[key], AssertionError):
            pytest.fail(f"{what} on {world_size} ranks failed before: see the first test that asked for it")
        return runs[key]

    return launch
