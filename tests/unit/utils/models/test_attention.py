"""The names that --attn_implementation takes."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes
from training.utils.models.arguments import ModelArguments


def test_an_unknown_implementation():
    mistakes = Mistakes()
    note_mistakes(ModelArguments("model", attn_implementation="flex"), mistakes)
    with pytest.raises(ThreestepError, match="--attn_implementation expects one of auto, sdpa.*, got 'flex'"):
        mistakes.raise_if_any()
