"""These tests start vLLM: they run where it is installed (scripts/test_vllm.sh) and are skipped elsewhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.support.forked_programs import FORKS_VARIABLE
from threestep.plugins.vllm.arguments import VllmArguments
from threestep.plugins.vllm.engine import VllmRollout

LONGEST_TOKENS = 64
# Attention on a CPU knows heads of 32 numbers and more.
SHAPES = {
    "llama": {"head_dim": 32, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if "/tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; scripts/test_vllm.sh brings it"))


@pytest.fixture(scope="session", autouse=True)
def no_forks() -> None:
    """vLLM starts processes and threads of its own as it is imported."""
    os.environ[FORKS_VARIABLE] = "0"


def started(decode=None, **flags) -> VllmRollout:
    """An engine with a small cache that compares all weights whenever they are sent."""
    return VllmRollout(decode, VllmArguments(**{"vllm_cache_gib": 0.05, "vllm_check_weights": True, **flags}), 64)


@pytest.fixture(scope="session")
def engines() -> Iterator[dict[str, VllmRollout]]:
    """One for each family, kept: each costs seconds to start."""
    from tests.unit.utils.generation.decoding.test_hf import spelt

    yield {family: started(spelt) for family in SHAPES}
