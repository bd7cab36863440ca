"""What plugins add to losses stays in float64, as `test_float64` shows of the core's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.invariants.test_float64 import INSIDE_BR, SEQUENCE_M, B, R, drawn, judge
from threestep.plugins.mismatch.figures import mismatch_measures
from threestep.plugins.mismatch.recipes import CORRECTIONS, LEVELS, REJECTIONS
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from threestep.plugins.mismatch.weights import corrected, loss_weights, sequences_of
from threestep.plugins.pretraining_loss.learnt_texts import pretraining_loss
from threestep.plugins.sft_losses.z_loss import z_loss
from training.step3_ppo.contracts.measures import moments as measured
from training.utils.contracts.rollout import DrawnTokens


def test_sums_over_tokens():
    judge(lambda: (z_loss(drawn(7), 3.0), pretraining_loss(drawn(7), 3.0)))


def test_the_sequences_of_tokens():
    assert torch.equal(sequences_of(INSIDE_BR), SEQUENCE_M)


@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize("correction", list(CORRECTIONS))
def test_mismatch(correction, level):
    rejection = tuple(rejection_of(f"{kind}:1.1") for kind in REJECTIONS)
    settings = MismatchSettings(
        correction, level, 1.3, 0.7, normalize=correction != "none", veto=0.1, rejection=rejection, rejected="leave"
    )
    old_BR, sampled_BR = drawn(B, R), drawn(B, R, seed=1)
    counts_B = torch.tensor([True, True, False, True, True, True])

    def compute() -> Any:
        tokens = DrawnTokens(INSIDE_BR, INSIDE_BR.sum(-1), sampled_BR)
        weights_BR, kept_BR = corrected(old_BR, tokens, counts_B, settings, over_ranks=lambda own: own)
        measures = mismatch_measures(old_BR, sampled_BR, INSIDE_BR, settings, weights_BR=weights_BR)
        in_loss_M = loss_weights((old_BR - sampled_BR)[INSIDE_BR], SEQUENCE_M, settings)
        return weights_BR, kept_BR, in_loss_M, [measure.values for measure in measures], measured(measures)

    judge(compute)
