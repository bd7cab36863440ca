"""Rows over several ranks: what is refused, and slices by hand: which tokens, which targets, what a model gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.configs import tiny_config
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.long_rows.attention import slice_attention
from threestep.plugins.long_rows.checks import check, check_beside, check_model, sizes_for
from threestep.plugins.long_rows.exchange import shareable
from threestep.plugins.long_rows.group import SequenceGroup
from threestep.plugins.long_rows.slices import RowSlice, sliced_inputs
from training.step3_ppo.flags.checks import ROLES, checked_components, why_apart
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.models.row_sharing import ALONE, ROW_PART
from training.utils.plugins.plugin import StepNeeds

TINY: dict[str, Any] = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 8}


def model_of(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))


OF_STATES = """mamba mamba2 falcon_mamba jamba bamba lfm2 lfm2_moe falcon_h1 rwkv recurrent_gemma zamba zamba2
    nemotron_h granitemoehybrid qwen3_next xlstm kimi_linear olmo_hybrid""".split()


OTHERS = {
    "bloom": "BloomForCausalLM does not pass arguments on to its attention",
    "minimax": "has linear_attention layers, whose rows cannot be split",
    "llama4_text": "has chunked_attention layers, whose rows cannot be split",
    "deepseek_v32": "has indexed_attention layers, whose rows cannot be split",
}


@pytest.mark.parametrize("family", [*OF_STATES, *OTHERS])
def test_families_whose_rows_are_not_shared_out(family: str):
    """Above all those with states and convolutions."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    reason = OTHERS.get(family, f"{type(model).__name__} has .*, which read neighboring tokens of the row")
    with pytest.raises(ThreestepError, match=f"--sequence_parallel_size 2: .*{reason}.*; drop"):
        check_model(model, 2, 32)
    if family in OF_STATES:
        assert sizes_for(model, 8, 32) == [1]


def test_rows_are_cut_into_slices():
    """Slices of three; the last one is filled with 0. Embeddings are cut along the row."""
    row_NT = torch.arange(1, 8).view(1, 7)
    slices = [RowSlice(SequenceGroup(3, place), 7).cut(row_NT).tolist() for place in range(3)]
    assert slices == [[[1, 2, 3]], [[4, 5, 6]], [[7, 0, 0]]]
    row_NTE = torch.arange(2 * 3 * 2).view(2, 3, 2)
    assert RowSlice(SequenceGroup(2, 1), 3).cut(row_NTE).tolist() == [[[4, 5], [0, 0]], [[10, 11], [0, 0]]]


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
    with pytest.raises(ThreestepError, match=r"--sequence_parallel_size 2 cannot be combined with --torch_compile yet"):
        mistakes.raise_if_any()


def test_what_a_plugin_reads_whole(monkeypatch):
    needs = StepNeeds({"--cheers": True, "--waves": False})
    monkeypatch.setattr("threestep.plugins.long_rows.checks.hooks", lambda name: [lambda flags: needs])
    mistakes = Mistakes()
    check(ppo_flags(sequence_parallel_size=2, reuse_forwards=True), mistakes)
    check(ppo_flags(reuse_forwards=True), mistakes)
    assert [sentence.partition(" yet")[0] for sentence in mistakes.sentences] == [
        "--sequence_parallel_size 2 cannot be combined with --reuse_forwards",
        "--sequence_parallel_size 2 cannot be combined with --cheers",
    ]


def test_forwards_that_read_are_of_their_own():
    given = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "reward": "model:1.0"}
    flags = ppo_flags(**given, sequence_parallel_size=2)
    algorithm = checked_components(flags).algorithm
    for name in ROLES:
        assert why_apart(name, flags, algorithm) == "ranks share rows (--sequence_parallel_size 2)"


def test_attention_of_the_familys_own():
    with pytest.raises(ThreestepError, match="'eager' is the family's own; use --attn_implementation sdpa if"):
        slice_attention("eager")


def test_slots_of_all_rows_are_cut_row_by_row():
    """Two rows of three on two ranks; and one of seven, its last block filled up to eight."""
    slots_L = torch.tensor([1, 2, 3, 4, 5, 6])
    slices = [RowSlice(SequenceGroup(2, place), 3).cut_slots(slots_L, -1).tolist() for place in range(2)]
    assert slices == [[1, 2, 4, 5], [3, -1, 6, -1]]
    assert RowSlice(SequenceGroup(2, 1), 8).cut_slots(torch.arange(7), -1).tolist() == [4, 5, 6, -1]


def test_every_position_belongs_to_one_rank():
    """Two rows of seven on three ranks: flat position 7 is the second row's first token, in slices of three."""
    positions_M = torch.tensor([0, 2, 3, 6, 7, 12, 13])
    owned = [RowSlice(SequenceGroup(3, place), 7).owned(positions_M) for place in range(3)]
    assert [each.which_m.tolist() for each in owned] == [[0, 1, 4], [2, 5], [3, 6]]
    assert [each.local_m.tolist() for each in owned] == [[0, 2, 3], [0, 5], [0, 3]]
    assert {each.count for each in owned} == {7}


def test_a_model_gets_a_slice_and_attention_the_row():
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    inputs = {
        "input_ids": torch.arange(5).view(1, 5),
        "position_ids": torch.arange(10, 15).view(1, 5),
        "attention_mask": mask,
        "runs": ("a run",),
    }
    given, part = sliced_inputs(inputs, SequenceGroup(2, 1))
    assert given["input_ids"].tolist() == [[3, 4, 0]] and given["position_ids"].tolist() == [[13, 14, 0]]
    assert given["attention_mask"].shape == (1, 1, 3, 3) and given["runs"] == ("a run",)
    assert given[ROW_PART] is part and part.mask is mask and part.width == 5


@pytest.mark.parametrize("heads, size, copies", [(4, 2, 1), (1, 2, 2), (3, 2, 2), (2, 8, 4), (6, 4, 2)])
def test_key_heads_are_repeated_until_they_can_be_shared_out(heads: int, size: int, copies: int):
    key_NKtD = torch.randn(1, heads, 3, 2)
    repeated = shareable(key_NKtD, SequenceGroup(size, 0))
    assert torch.equal(repeated, key_NKtD.repeat_interleave(copies, dim=1))


def test_groups_that_do_not_share_out_the_ranks():
    with pytest.raises(ThreestepError, match=r"must divide the 6 ranks, got 4; use one of 1, 2, 3, 6,"):
        SequenceGroup(4).joined(0, 6)
    assert SequenceGroup(1).joined(3, 4) is ALONE


def test_heads_that_can_be_shared_out_and_that_cannot():
    alone = model_of("llama", num_attention_heads=6, num_key_value_heads=1)
    for size in (1, 2, 3, 6):
        check_model(alone, size, 32)
    model = model_of("llama", num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(
        ThreestepError, match=r"must divide the 6 attention heads of LlamaForCausalLM, got 4; use one of 1, 2"
    ):
        check_model(model, 4, 32)
    check_model(model, 1, 32)
    assert sizes_for(model, 6, 32) == [1, 2, 3, 6] and sizes_for(model, 8, 32) == [1, 2]
