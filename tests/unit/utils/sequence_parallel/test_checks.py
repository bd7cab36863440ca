"""What is refused with rows over several ranks, and in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.sequence_parallel.attention import slice_attention
from training.utils.sequence_parallel.checks import check_beside, check_model, check_texts

TINY: dict[str, Any] = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 8}


def model_of(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_heads_that_can_be_shared_out(size: int):
    check_model(model_of("llama", num_attention_heads=6, num_key_value_heads=1), size, 32)


def test_heads_that_cannot():
    model = model_of("llama", num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(ThreestepError, match=r"divisor of the 6 attention heads of LlamaForCausalLM \(1, 2, 3, 6\), g"):
        check_model(model, 4, 32)
    check_model(model, 1, 32)


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        ("mamba", {"state_size": 4}, "MambaForCausalLM has state-space or convolution layers"),
        (
            "lfm2",
            {"num_attention_heads": 2, "layer_types": ["conv", "full_attention"]},
            "state-space or convolution layers",
        ),
        ("bloom", {"n_head": 2}, "BloomForCausalLM passes no arguments on to its attention"),
        (
            "mistral",
            {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 16},
            "has a sliding window of 16 tokens, shorter than the sequences",
        ),
    ],
)
def test_families_whose_rows_are_not_shared_out(family: str, changes: dict[str, Any], reason: str):
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2: .*{reason}.*; leave"):
        check_model(model_of(family, **changes), 2, 32)


def test_layers_of_another_kind():
    model = model_of("llama", num_attention_heads=2, num_key_value_heads=2)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ThreestepError, match="has layers of linear_attention, whose rows are not shared out"):
        check_model(model, 2, 32)


def test_flags_that_do_not_go_with_it():
    mistakes = Mistakes()
    check_beside(mistakes, 1, {"--torch_compile": True})
    mistakes.raise_if_any()
    check_beside(mistakes, 2, {"--torch_compile": True, "--record_steps": False})
    with pytest.raises(ThreestepError, match=r"--sequence_parallel_size 2 cannot go with --torch_compile yet"):
        mistakes.raise_if_any()


def test_rows_with_more_than_text():
    check_texts(None, 2)
    check_texts(SimpleNamespace(name="images"), 1)
    with pytest.raises(ThreestepError, match="is of rows of text alone, and rows of the data have images"):
        check_texts(SimpleNamespace(name="images"), 2)


def test_attention_of_the_familys_own():
    with pytest.raises(ThreestepError, match="'eager' is the family's own; use --attn_implementation sdpa"):
        slice_attention("eager")
