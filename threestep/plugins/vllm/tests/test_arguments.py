"""The flags of vLLM, checked before anything loads."""

from __future__ import annotations

import pytest

from threestep.plugins.vllm.arguments import VllmArguments
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"vllm_memory_share": 1.0}, "--vllm_memory_share expects more than 0 and less than 1, got 1.0"),
        ({"vllm_cache_gib": 0.0}, "--vllm_cache_gib expects more than 0, got 0.0"),
        (
            {"vllm_tensor_parallel_size": 0},
            "--vllm_tensor_parallel_size expects 1 or more, got 0",
        ),
        (
            {"vllm_tensor_parallel_size": 2, "vllm_check_weights": True},
            "--vllm_check_weights expects whole weights, and --vllm_tensor_parallel_size is 2; leave one out",
        ),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    note_mistakes(VllmArguments(**given), mistakes)
    assert mistakes.sentences == [sentence]


def test_the_defaults_are_sound():
    mistakes = Mistakes()
    note_mistakes(VllmArguments(), mistakes)
    assert mistakes.sentences == []
