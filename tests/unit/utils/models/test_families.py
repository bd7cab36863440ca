"""Which class loads a model of images and text, and which of its parts are language, tower and projector."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, LlamaConfig, Qwen2VLConfig

from tests.support.tiny_models import tiny_causal_lm
from training.utils.models.families import (
    is_beside_language,
    language_model_class,
    language_part,
)


def test_a_text_model_is_language_as_a_whole():
    model = tiny_causal_lm("llama")
    assert language_part(model) is model
    assert not any(is_beside_language(model)(name) for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "config, with_media, auto_class",
    [
        (LlamaConfig(), False, AutoModelForCausalLM),
        (Qwen2VLConfig(), False, AutoModelForImageTextToText),  # there is no other
        (Qwen2VLConfig(), True, AutoModelForImageTextToText),
        (Gemma3Config(), False, AutoModelForCausalLM),
        (Gemma3Config(), True, AutoModelForImageTextToText),
    ],
)
def test_the_class_that_loads_a_model(config, with_media, auto_class):
    assert language_model_class(config, with_media) is auto_class
