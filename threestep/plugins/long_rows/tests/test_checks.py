"""What is refused with rows over several ranks, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.configs import tiny_config
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.long_rows.attention import slice_attention
from threestep.plugins.long_rows.checks import check, check_beside, check_model, sizes_for
from training.step3_ppo.flags.checks import ROLES, checked_components, why_apart
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.plugins.plugin import StepNeeds

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
    assert sizes_for(model, 6, 32) == [1, 2, 3, 6] and sizes_for(model, 8, 32) == [1, 2]


OF_STATES = """mamba mamba2 falcon_mamba jamba bamba lfm2 lfm2_moe falcon_h1 rwkv recurrent_gemma zamba zamba2
    nemotron_h granitemoehybrid qwen3_next xlstm kimi_linear olmo_hybrid""".split()


@pytest.mark.parametrize("family", OF_STATES)
def test_states_and_convolutions_are_not_shared_out(family: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    name = type(model).__name__
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2: {name} has .*, which read their neighbours"):
        check_model(model, 2, 32)
    assert sizes_for(model, 8, 32) == [1]


@pytest.mark.parametrize(
    "family, reason",
    [
        ("bloom", "BloomForCausalLM passes no arguments on to its attention"),
        ("minimax", "has layers of linear_attention, whose rows are not shared out"),
        ("llama4_text", "has layers of chunked_attention, whose rows are not shared out"),
        ("deepseek_v32", "has layers of indexed_attention, whose rows are not shared out"),
    ],
)
def test_families_whose_rows_are_not_shared_out(family: str, reason: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2: .*{reason}.*; leave"):
        check_model(model, 2, 32)


def test_a_window_whose_mask_no_rank_would_hold():
    model = model_of("mistral", num_attention_heads=2, num_key_value_heads=2, sliding_window=16)
    check_model(model, 2, 32_768)
    with pytest.raises(ThreestepError, match=r"has a sliding window of 16 tokens, whose mask for sequences of 131,072"):
        check_model(model, 2, 131_072)


def test_flags_that_do_not_go_with_it():
    mistakes = Mistakes()
    check_beside(mistakes, 1, {"--torch_compile": True})
    mistakes.raise_if_any()
    check_beside(mistakes, 2, {"--torch_compile": True, "--record_steps": False})
    with pytest.raises(ThreestepError, match=r"--sequence_parallel_size 2 cannot go with --torch_compile yet"):
        mistakes.raise_if_any()


def test_what_a_plugin_reads_whole(monkeypatch):
    needs = StepNeeds({"--cheers": True, "--waves": False})
    monkeypatch.setattr("threestep.plugins.long_rows.checks.hooks", lambda name: [lambda flags: needs])
    mistakes = Mistakes()
    check(ppo_flags(sequence_parallel_size=2, reuse_forwards=True), mistakes)
    check(ppo_flags(reuse_forwards=True), mistakes)
    assert [sentence.partition(" yet")[0] for sentence in mistakes.sentences] == [
        "--sequence_parallel_size 2 cannot go with --reuse_forwards",
        "--sequence_parallel_size 2 cannot go with --cheers",
    ]


def test_forwards_that_read_are_of_their_own():
    given = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "reward": "model:1.0"}
    flags = ppo_flags(**given, sequence_parallel_size=2)
    algorithm = checked_components(flags).algorithm
    for name in ROLES:
        assert why_apart(name, flags, algorithm) == "ranks share rows (--sequence_parallel_size 2)"


def test_attention_of_the_familys_own():
    with pytest.raises(ThreestepError, match="'eager' is the family's own; use --attn_implementation sdpa where"):
        slice_attention("eager")
