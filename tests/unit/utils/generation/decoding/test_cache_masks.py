"""The mask of each token, cut from one that is made once."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.support.tiny_models import tiny_causal_lm
from training.utils.generation.decoding.cache import StepMasks, moves_when_leaving, roomy_cache, windows_of

SEEN = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()


def shown(mask_A11L: torch.Tensor) -> list[list[int]]:
    assert set(mask_A11L.unique().tolist()) <= {0.0, float("-inf")}
    return (mask_A11L[:, 0, 0] == 0).int().tolist()


def test_one_kind_is_a_mask_and_several_are_masks_by_name():
    masks = StepMasks({"": None}, SEEN, torch.bfloat16)
    assert masks.at(4).dtype == torch.bfloat16 and masks.at(4).shape == (3, 1, 1, 4)
    assert shown(masks.at(4)) == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    masks.leave(moves_when_leaving([True, False, False], SEEN.device))  # the last row fills the hole
    assert shown(masks.at(5)) == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    both = StepMasks({"full_attention": None, "sliding_attention": 3}, SEEN, torch.float32).at(4)
    assert shown(both["full_attention"]) == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert shown(both["sliding_attention"]) == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]


def test_windows_of_a_family():
    for family, windows in (
        ("llama", {"": None}),
        ("qwen3", {"full_attention": None}),
        ("gemma3_text", {"full_attention": None, "sliding_attention": 8}),
    ):
        model = tiny_causal_lm(family)
        assert windows_of(model.config, roomy_cache(model, 20)) == windows


def test_layers_of_other_kinds_are_refused():
    model = tiny_causal_lm("mamba")
    with pytest.raises(ValueError, match="a layer of its own kind"):
        windows_of(model.config, roomy_cache(model, 20))
    two = DynamicCache()
    two.layers = [DynamicSlidingWindowLayer(4), DynamicSlidingWindowLayer(5)]
    with pytest.raises(ValueError, match="layers of one kind have different windows"):
        windows_of(LlamaConfig(), two)
