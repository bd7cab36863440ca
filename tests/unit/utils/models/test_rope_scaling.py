"""Scaled rotary positions: the angles by the papers' formulas, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.models.rope_scaling import RopeScaling, check_scaling, read_scaling, scaled


def tiny(**changes: Any) -> LlamaConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128, **changes}
    return LlamaConfig(**shape)


def frequencies(config: Any) -> torch.Tensor:
    return LlamaRotaryEmbedding(config).inv_freq.double()


def test_linear_divides_every_position():
    """Position 8 has the angles that 4 had."""
    config = scaled(tiny(), "linear:2", "a model")
    assert config.max_position_embeddings == 256
    torch.testing.assert_close(frequencies(config), frequencies(tiny()) / 2)


def test_yarn_keeps_fast_angles_and_divides_slow_ones():
    """Peng et al., equations 17 and 23: of wavelengths above 128 positions (one rotation) a quarter of the frequency,
    of those below 4 (32 rotations) all of it; states are scaled by 0.1 ln 4 + 1."""
    config = scaled(tiny(), "yarn:4", "a model")
    before, after = frequencies(tiny()), frequencies(config)
    wavelengths = 2 * math.pi / before
    ratio = after / before
    assert float(ratio[0]) == pytest.approx(1.0) and float(ratio[-1]) == pytest.approx(0.25)
    assert torch.all(ratio.diff() <= 1e-12) and int((wavelengths > 128).sum()) > 1
    assert LlamaRotaryEmbedding(config).attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 512


def test_the_models_own_configuration_stays():
    config = tiny()
    assert scaled(config, None, "a model") is config
    scaled(config, "yarn:2", "a model")
    assert config.rope_parameters["rope_type"] == "default" and config.max_position_embeddings == 128


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:1", "yarn:nan", "dynamic:2", "4", "linear:inf"])
def test_texts_that_are_no_scaling(text: str):
    with pytest.raises(ThreestepError, match="--rope_scaling expects a type"):
        read_scaling(text)
    mistakes = Mistakes()
    check_scaling(mistakes, text)
    with pytest.raises(ThreestepError, match=r"such as yarn:4, got"):
        mistakes.raise_if_any()


def test_texts_that_are_one():
    assert read_scaling("linear:1.5") == RopeScaling("linear", 1.5)
    mistakes = Mistakes()
    check_scaling(mistakes, None)
    mistakes.raise_if_any()


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_positions_that_are_not_rotary_or_of_two_kinds(family: str):
    with pytest.raises(ThreestepError, match=rf"'a model' \({family}\) has none or several"):
        scaled(AutoConfig.for_model(family), "yarn:2", "a model")


def test_positions_that_are_scaled_already():
    config = scaled(tiny(), "yarn:2", "a model")
    with pytest.raises(ThreestepError, match=r"are scaled already \(yarn, 256 of them\)"):
        scaled(config, "yarn:2", "a model")
