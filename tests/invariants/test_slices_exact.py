"""Training with each row over several ranks equals plain PyTorch in float64: losses, gradient norms, figures of
evaluations, weights after four steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.invariants import engine_program, sliced_program, test_mixture_exact
from tests.invariants.engine_program import Case
from tests.invariants.test_engine_exact import (
    accuracies,
    assert_weights_equal,
    loaded,
    lora_trained_plainly,
    rounding_of,
    start_of,
    trained_plainly,
    trained_with_noise,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


def marked(world_size: int, case: Case) -> Any:
    is_ordinary = world_size == 2 and case.name in sliced_program.ORDINARY
    marks = [] if is_ordinary else [pytest.mark.long]
    return pytest.param(world_size, case, id=f"{world_size}-{case.name}", marks=marks)


def is_balanced(case: Case) -> bool:
    """A mixture of experts with its balancing loss."""
    return case.model.startswith("mixture") and case.router_coef is None


EVERY = [(size, each.case) for size in (2, 4) for each in sliced_program.cases(size)]
CASES = [marked(size, case) for size, case in EVERY if not case.z_loss_coef and not is_balanced(case)]
BALANCED = [marked(size, case) for size, case in EVERY if is_balanced(case)]
REGULARIZED = [marked(size, case) for size, case in EVERY if case.z_loss_coef]


@pytest.mark.parametrize("world_size, case", CASES)
def test_rows_over_several_ranks_train_as_plain_pytorch(launched, models, world_size: int, case: Case):
    out, reports = launched("sliced_program", world_size)
    got = reports[0][case.name]
    assert got["packed"] is case.packed and got["said"] == []
    want, want_evals = trained_plainly(models / case.model, case.kind, case.rows, case.per_step, case.dtype)
    half, more = case.dtype == "bf16", 2 if case.shared or case.kind == "kto" else 1
    rounding = more * rounding_of(case.kind)
    assert got["losses"] == pytest.approx(want.losses, abs=3e-2 if half else rounding)
    assert got["evals"] == pytest.approx(want_evals, rel=5e-3 if half else rounding)
    if case.zero_stage > 0 or half:
        assert got["norms"] == pytest.approx(want.norms, rel=2e-2 if half else more * 2e-6)
    tolerance, along = (0.08, 5e-3) if half else (1e-4, 1e-5) if case.model == "mixture" else (1e-5, 1e-6)
    assert_weights_equal(
        loaded(out / case.name), want.weights, start_of(models / case.model, case.kind), tolerance, along
    )
    if (case.kind, case.model, case.rows, case.per_step, half) == ("sft", "causal", "plain", 6, False):
        want_train, want_eval = accuracies(models / "causal")
        assert got["train_accuracies"] == pytest.approx(want_train, abs=1e-9)
        assert got["eval_accuracies"] == pytest.approx(want_eval, abs=1e-9)
    if case.kind == "ranking":
        assert got["chosen"]["count"] == 5


@pytest.mark.parametrize("world_size, case", BALANCED)
def test_routers_over_several_ranks_balance_over_whole_rows(launched, models, world_size: int, case: Case):
    """The load is of every token once, whichever rank has it; the loss, its figures and weights of plain PyTorch."""
    out, reports = launched("sliced_program", world_size)
    test_mixture_exact.check(case, models, out, reports[0][case.name])


@pytest.mark.parametrize("world_size, case", REGULARIZED)
def test_noise_and_z_loss_over_several_ranks(launched, models, world_size: int, case: Case):
    """Noise is made for whole rows; log^2 Z is of every target."""
    out, reports = launched("sliced_program", world_size)
    got, start = reports[0][case.name], start_of(models / "causal", "sft")
    if case.lora_dim:
        want, weights = lora_trained_plainly(models, "sft", regularized=True)
    else:
        want = trained_with_noise(start)
        weights = want.weights
    losses = [nll + engine_program.Z_LOSS_COEF * z for nll, z in zip(got["losses"], got["z_losses"], strict=True)]
    assert losses == pytest.approx(want.losses, abs=5e-6)
    tolerance, along = (1e-4, 1e-5) if case.lora_dim else (1e-5, 1e-6)
    assert_weights_equal(loaded(out / case.name), weights, start, tolerance, along)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_check_at_the_start_reads_slices(launched, world_size: int):
    """A wrong exchange ends a run: its numbers are not those of the model's own forward."""
    _, reports = launched("sliced_program", world_size)
    for each in reports:
        sentence = f"--sequence_parallel_size {world_size}: LlamaForCausalLM cannot be trained: padded rows differ by"
        assert each["refused"].startswith(sentence)


def test_one_rank_alone_knows_no_groups(models):
    """The name of an attention function means what it did, unless rows are shared out."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from threestep.plugins.long_rows.attention import SlicedAttention, slice_attention

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
