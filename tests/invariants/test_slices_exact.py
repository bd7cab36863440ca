"""Training with each row over several ranks equals plain PyTorch in float64: losses, gradient norms, figures of
evaluations, weights after four steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.invariants import test_engine_exact, test_mixture_exact
from tests.invariants.engine_program import (
    LONGEST,
    LORA_DIM,
    REGULARIZED,
    REGULARIZED_LORA,
    Case,
    make_engine,
    run_case,
)  # fmt: skip
from tests.invariants.test_engine_exact import start_of
from tests.support.shared_rows import sharing_rows
from threestep.plugins.long_rows import attention
from threestep.plugins.long_rows.attention import SlicedAttention, slice_attention
from training.utils.base.errors import ThreestepError
from training.utils.setup.setup import may_pack


@dataclass(frozen=True)
class SlicedCase:
    """A case on groups of `size` ranks."""

    size: int
    case: Case


# Which run unless it is the long form, on two ranks.
ORDINARY = "packed_dpo_z3 packed_ranking_z2 padded_sft_z1 shared_sft regularized balanced_sft_z3".split()


def cases(world_size: int) -> list[SlicedCase]:
    """Steps 1 and 2 at every ZeRO stage, packed and padded, and what else touches a forward. Four ranks are one group
    of four and two of two; models have two key-value heads."""
    packed = Case("", packed=True, micro=6)
    kinds = {"sft": "causal", "dpo": "causal", "ranking": "scalar", "kto": "causal"}
    found = [
        replace(packed, name=f"packed_{kind}_z{stage}", kind=kind, model=model, zero_stage=stage)
        for kind, model in kinds.items()
        for stage in range(4)
    ]
    found += [Case(f"padded_{kind}_z1", kind, model, zero_stage=1, micro=2) for kind, model in kinds.items()]
    found += [
        replace(packed, name="packed_in_turns", micro=1, checkpointing=True, zero_stage=3),
        replace(packed, name="tiles", checkpointing=True, zero_stage=3, tiles=3),
        replace(packed, name="untied", model="untied", zero_stage=2),
        replace(packed, name="offload", offload=True, zero_stage=2),
        replace(packed, name="offload_z3", offload=True, zero_stage=3),
        replace(packed, name="bf16", dtype="bf16", zero_stage=2),
        replace(packed, name="shared_sft", rows="conversations", shared=4),
        replace(packed, name="shared_dpo", rows="conversations", shared=4, kind="dpo", zero_stage=2),
        replace(packed, name="margins", kind="ranking", model="scalar", rows="margins"),
        replace(packed, name="one_a_step", per_step=1, zero_stage=2),
        replace(packed, name="mixture", model="mixture", router_coef=0.0, zero_stage=2),
        replace(packed, name="regularized", zero_stage=3, **REGULARIZED),
        replace(packed, name="regularized_lora", zero_stage=2, **REGULARIZED_LORA),
    ]
    found += [replace(packed, name=family, model=family) for family in ("qwen3", "gpt2", "opt", "gemma3_text")]
    mixtures = (("sft", "", 0), ("dpo", "", 1), ("ranking", "_scalar", 2), ("sft", "", 3))
    several = replace(packed, micro=2)  # micro-batches, whose load is counted before the first backward
    found += [
        replace(several, name=f"balanced_{kind}_z{stage}", kind=kind, model=f"mixture{form}", zero_stage=stage)
        for kind, form, stage in mixtures
    ]
    mixture = replace(packed, model="mixture")
    found += [
        replace(mixture, name="balanced_at_once", zero_stage=3),
        replace(mixture, name="balanced_padded", packed=False, micro=2, checkpointing=True),
        replace(mixture, name="balanced_wide", model="mixture_wide", zero_stage=3),
        replace(mixture, name="balanced_shared", rows="conversations", shared=4, zero_stage=2),
        replace(mixture, name="balanced_lora", lora_dim=LORA_DIM, lora_part="self_attn", checkpointing=True),
    ]
    sizes = [size for size in (2, 4) if world_size % size == 0]
    return [
        SlicedCase(size, replace(case, name=case.name if size == world_size else f"{case.name}_two_groups"))
        for size in sizes
        for case in found
    ]


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """engine_program's cases, each row over `size` ranks (`--sequence_parallel_size`); and "refused", what the check at
    the start says of a wrong exchange."""
    found: dict[str, Any] = {
        each.case.name: run_case(each.case, models, out, sharing_rows(ranks, each.size))
        for each in cases(ranks.world_size)
        if is_long or each.case.name in ORDINARY
    }
    return {**found, "refused": refused(models, sharing_rows(ranks, ranks.world_size))}


def refused(models: Path, ranks: Any) -> str:
    """Return the sentence of a run in which the output of each head is taken for the next one's."""
    engine, model = make_engine(Case("refused"), models, ranks)
    whole = attention.slices_of_rows
    try:
        with mock.patch.object(attention, "slices_of_rows", lambda *given: whole(*given).roll(1, 2)):
            may_pack(False, model, engine, lambda rows: engine(rows).logprobs_M, longest_tokens=LONGEST, log=print)
    except ThreestepError as refusal:
        return str(refusal)
    finally:
        ranks.leaving.close()
    return ""


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def marked(world_size: int, case: Case) -> Any:
    is_ordinary = world_size == 2 and case.name in ORDINARY
    marks = [] if is_ordinary else [pytest.mark.long]
    return pytest.param(world_size, case, id=f"{world_size}-{case.name}", marks=marks)


def is_balanced(case: Case) -> bool:
    """A mixture of experts with its balancing loss."""
    return case.model.startswith("mixture") and case.router_coef is None


EVERY = [marked(size, each.case) for size in (2, 4) for each in cases(size)]
BALANCED = [each for each in EVERY if is_balanced(each.values[1])]
CASES = [each for each in EVERY if each not in BALANCED]


@pytest.mark.parametrize("world_size, case", CASES)
def test_rows_over_several_ranks_train_as_plain_pytorch(launched, models, world_size: int, case: Case):
    """Noise is made for whole rows; log^2 Z is of every target."""
    out, reports = launched("test_slices_exact", world_size)
    got = reports[0][case.name]
    assert got["said"] == []
    test_engine_exact.check(case, models, out, got)
    if case.kind == "ranking":
        assert got["chosen"]["count"] == 5


@pytest.mark.parametrize("world_size, case", BALANCED)
def test_routers_over_several_ranks_balance_over_whole_rows(launched, models, world_size: int, case: Case):
    """The load is of every token once, whichever rank has it; the loss, its figures and weights of plain PyTorch."""
    out, reports = launched("test_slices_exact", world_size)
    test_mixture_exact.check(case, models, out, reports[0][case.name])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_check_at_the_start_reads_slices(launched, world_size: int):
    """A wrong exchange ends a run: its numbers are not those of the model's own forward."""
    _, reports = launched("test_slices_exact", world_size)
    for each in reports:
        sentence = f"--sequence_parallel_size {world_size}: LlamaForCausalLM cannot be trained: its outputs for padded "
        assert each["refused"].startswith(sentence)


def test_one_rank_alone_knows_no_groups(models):
    """The name of an attention function means what it did, unless rows are shared out."""
    assert not isinstance(ALL_ATTENTION_FUNCTIONS["sdpa"], SlicedAttention)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        slice_attention("sdpa")
        slice_attention("sdpa")
        assert ALL_ATTENTION_FUNCTIONS["sdpa"].whole is before
        ids = torch.randint(2, 20, (1, 7))
        model = start_of(models / "causal", "sft")
        with torch.no_grad():
            sliced = model(input_ids=ids).logits
            ALL_ATTENTION_FUNCTIONS.register("sdpa", before)
            assert torch.equal(model(input_ids=ids).logits, sliced)
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", before)
