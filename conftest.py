"""What every test shares, those of plugins too: markers by folder, and a tokenizer and a model made on the spot."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import pairs_file, place, text_file  # noqa: F401  # for those of plugins
from tests.support.cuda_stand_in.building import why_not
from tests.support.cuda_stand_in.client import StandIn
from tests.support.forked_programs import FORKS_VARIABLE
from tests.support.needed_plugins import missing_plugins
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.plugins.registry import plugins

# No test reaches a hub: a name that is not on disk fails at once instead of waiting for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models of these sizes gain nothing from a second thread, and two that share a core only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).parent
FOLDER_MARKERS = {
    "unit": "unit",
    "distributed": "distributed",
    "invariants": "distributed",  # they compare one rank with several
    "end_to_end": "end_to_end",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="the long form: also the tests marked `long`, every case of the launched programs, and no forks",
    )
    if (
        find_spec("pytest_timeout") is None
    ):  # the house rules run with pytest alone; pyproject.toml sets this for others
        parser.addini("timeout", "seconds that a test may take; no limit without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ[FORKS_VARIABLE] = "0"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests of plugins that are not there."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and missing_plugins(collection_path) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that need plugins which are not there."""
    files = [file for folder in ("tests", "threestep") for file in sorted((_ROOT / folder).rglob("test_*.py"))]
    for file in files:
        if missing := missing_plugins(file):
            terminalreporter.line(f"left out: {file.relative_to(_ROOT)} needs {', '.join(sorted(missing))}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No look for garbage goes through the modules and the twelve thousand tests while they become more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_long(config, items)
    for item in items:
        for folder, marker in FOLDER_MARKERS.items():
            if f"/tests/{folder}/" in item.path.as_posix():
                item.add_marker(marker)
        if item.path.parent.name == "tests" and "plugins" in item.path.parts:  # of a plugin, and no program
            item.add_marker("unit")
        needed = {name for marker in item.iter_markers("needs_plugin") for name in marker.args}
        if missing := sorted(needed - plugins().keys()):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


def _leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to the long form, unless it was asked for."""
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def _has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread_a_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that a test starts run one thread each: ranks with more would fight over two cores."""
    if any(request.node.get_closest_marker(marker) for marker in ("distributed", "end_to_end")):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


@pytest.fixture(scope="session")
def on_cuda() -> Iterator[Callable[..., Any]]:
    """on_cuda(function, *arguments) -> its result, of a function that has a pretended GPU."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    stand_in = StandIn()
    yield stand_in.run
    stand_in.close()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A tokenizer of a few hundred tokens whose pad is not its eos."""
    return train_tokenizer(SENTENCES)


@pytest.fixture(scope="session")
def tiny_tokenizer_pad_is_eos():
    """The same vocabulary without a pad token of its own: pad is eos."""
    return train_tokenizer(SENTENCES, pad_is_eos=True)


@pytest.fixture
def tiny_llama_config(tiny_tokenizer):
    """A Llama shape of some ten thousand weights, for the tiny tokenizer; a fresh one for each test."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
