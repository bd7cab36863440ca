"""What DeepSpeed's engine cannot draw, and from which models."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.unit.utils.generation.decoding.test_decode_check import known
from threestep.plugins.hybrid.engine import HybridRollout
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.generation.table import checked_engine


def test_what_it_does_not_support():
    mistakes = Mistakes()
    assert checked_engine("hybrid", {"min_p": 0.0, "bad_words": [], "stop": ["x"]}, mistakes) is HybridRollout
    assert mistakes.sentences == []
    checked_engine("hybrid", {"min_p": 0.1, "bad_words": ["x"]}, mistakes)
    assert mistakes.sentences == [
        "--rollout_engine hybrid does not support --min_p, got 0.1; leave it out or use another engine",
        "--rollout_engine hybrid does not support --bad_words, got ['x']; leave it out or use another engine",
    ]


def test_an_engine_that_only_pads_refuses_who_cannot():
    model, own = known("llama")
    assert HybridRollout().check(nullcontext(model), own) == []
    model, own = known("rwkv+unscaled")
    with pytest.raises(ThreestepError, match="--rollout_engine hybrid draws by .* RwkvForCausalLM cannot: .* hf"):
        HybridRollout().check(nullcontext(model), own)
