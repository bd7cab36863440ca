"""Scaled rotary positions: the angles by the papers' formulas, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.models.rope_scaling import (
    RopeScaling,
    check_scaling,
    read_scaling,
    scaled,
    scaled_positions,
    steady_positions,
)


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


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
PUBLISHED = {  # rope_type: parameters, max_position_embeddings, positions, steady positions
    "default": ({"rope_type": "default"}, 128, 128, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 512, 512, None),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 128, 128, None),  # its angles change beyond them
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512, None),
    "yarn, as Qwen2.5 tells": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 128, 512, None
    ),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 64}, 512, 512, None),
    "longrope": ({**LONG, "original_max_position_embeddings": 32}, 512, 512, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_of_every_type(name: str):
    """The types of transformers, as published models have them."""
    assert {rope["rope_type"] for rope, *_ in PUBLISHED.values()} == {"default", *ROPE_INIT_FUNCTIONS} - {
        "proportional"
    }
    rope, given, positions, steady = PUBLISHED[name]
    config = tiny(max_position_embeddings=given, rope_parameters={"rope_theta": 1e4, **rope})
    assert (scaled_positions(config), steady_positions(config)) == (positions, steady)
    if name != "default":
        with pytest.raises(ThreestepError, match="are scaled already"):
            scaled(config, "yarn:2", "a model")


def test_a_type_that_moves_is_one_whose_angles_change_beyond_steady_positions():
    rope = {"rope_theta": 1e4, **LONG, "original_max_position_embeddings": 32}
    made = LlamaRotaryEmbedding(tiny(max_position_embeddings=512, rope_parameters=rope))
    states = torch.zeros(1, 1, 32)

    def angles(tokens: int) -> torch.Tensor:
        """Of the first ten positions, in a batch whose longest sequence has so many tokens."""
        return made(states, torch.arange(tokens)[None])[0][:, :10].clone()

    assert torch.equal(angles(12), angles(32)) and not torch.equal(angles(33), angles(32))


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
