"""Where all responses to a prompt are one text there is no advantage, in any layout, dtype and number of ranks; and
layouts agree on all others as far as the scores' rounding lets them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.invariants.equal_responses_program import BATCH, ESTIMATORS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]  # on a busy machine
PROGRAM = Path(__file__).parent / "equal_responses_program.py"
# Of a score, between two layouts, as a share of the largest of a batch: some units in the last place (see `scoring`).
ROUNDING = {"fp32": 32 * torch.finfo(torch.float32).eps, "bf16": 16 * torch.finfo(torch.bfloat16).eps}


@pytest.mark.parametrize(
    "groups", [len(ESTIMATORS) * BATCH, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_no_advantage_where_all_responses_are_one_text(tmp_path, groups):
    for ranks in (1, 2):
        run_ranks(PROGRAM, ranks, [tmp_path, groups], 3000)
    found = {ranks: torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2)}
    layouts = {f"{ranks} {layout}": batches for ranks, own in found.items() for layout, batches in own.items()}
    alike = equal = 0
    for name, batches in layouts.items():
        for batch in batches:
            is_one = torch.tensor([all(ids == responses[0] for ids in responses) for responses in batch["ids"]])
            largest = float(batch["advantages"][is_one].abs().amax()) if is_one.any() else 0.0
            assert largest == 0.0, (name, batch["estimator"], largest)
            differs = batch["outcomes"].amax(dim=1) != batch["outcomes"].amin(dim=1)
            assert not differs.flatten()[is_one].any(), name
            alike, equal = alike + int(is_one.sum()), equal + int((~differs).sum())
    assert alike > len(layouts) * groups // 6  # and of the others few are equal
    assert alike <= equal < 1.1 * alike
    first = {dtype: layouts[f"1 {dtype}_packed"] for dtype in ROUNDING}
    for dtype, ranks, layout in product(ROUNDING, found, ("packed", "padded")):
        for one, other in zip(first[dtype], layouts[f"{ranks} {dtype}_{layout}"], strict=True):
            agree(one, other, dtype)


def agree(one: dict, other: dict, dtype: str) -> None:
    """Outcomes differ by rounding; advantages by that over what they are divided by."""
    scores, others = one["outcomes"].squeeze(-1), other["outcomes"].squeeze(-1)
    rounding = ROUNDING[dtype] * float(scores.abs().max())
    assert (scores - others).abs().max() <= rounding
    if one["estimator"] == "grpo":
        apart = (one["advantages"] - other["advantages"]).abs().amax(dim=(1, 2))
        spread = torch.minimum(scores.std(dim=1), others.std(dim=1))
        assert (apart <= 4 * rounding / spread).all()  # no bound where one of them sees no spread
        is_wide = spread > 0.1 * float(scores.abs().max())
        assert is_wide.any() and apart[is_wide].max() < {"fp32": 2.5e-4, "bf16": 0.25}[dtype]


def test_every_estimator_that_compares_samples_is_among_them():
    from training.step3_ppo.advantages import ESTIMATORS as TABLE

    assert {name for name, estimator in TABLE.items() if estimator.needs_groups} <= set(ESTIMATORS)
