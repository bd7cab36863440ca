"""Mistakes in the flags of sampling."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes
from training.utils.generation.arguments import SamplingArguments


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_new_tokens": 0}, "--max_new_tokens expects 1 or more, got 0"),
        ({"temperature": -1.0}, "--temperature expects 0 or more, got -1.0"),
        ({"top_k": -1}, "--top_k expects 0 or more, got -1"),
        ({"top_p": 0.0}, "--top_p expects more than 0 and at most 1, got 0.0"),
        ({"min_p": 2.0}, "--min_p expects a number from 0 to 1, got 2.0"),
        ({"dtype": "int8"}, "--dtype expects one of fp32, bf16, fp16, got 'int8'"),
    ],
)
def test_mistakes(changes, sentence):
    mistakes = Mistakes()
    note_mistakes(SamplingArguments(**changes), mistakes)
    assert mistakes.sentences == [sentence]
