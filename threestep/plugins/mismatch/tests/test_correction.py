"""The correction of a run's flags, and what of it the loop asks for."""

from __future__ import annotations

import pytest
import torch

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.correction import MismatchCorrection, correction
from threestep.plugins.mismatch.recipes import RECIPES
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from training.step3_ppo.contracts.records import Corrected
from training.utils.contracts.rollout import DrawnTokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_arrive_and_flags_win(recipe):
    found, wanted = correction(ppo_flags(mismatch_recipe=recipe)).settings, dict(RECIPES[recipe].flags)
    rejection = tuple(rejection_of(each) for each in wanted.pop("rejection", ()))
    assert found == MismatchSettings(**wanted, rejection=rejection) and found.acts == (recipe != "disabled")
    other = correction(ppo_flags(mismatch_recipe=recipe, mismatch_threshold=7.0, mismatch_veto=1e-3)).settings
    assert (other.threshold, other.veto) == (7.0, 1e-3)


def test_other_programs_and_older_weights_are_corrected_by_default():
    assert not correction(ppo_flags()).reads_old_policy
    assert correction(ppo_flags(rollout_engine="vllm")).settings.correction == "truncate"
    assert correction(ppo_flags(rollouts_ahead=1)).settings.correction == "truncate"
    assert not correction(ppo_flags(rollouts_ahead=1, mismatch_correction="none")).settings.acts


def test_a_bypass_is_the_losss():
    """Nothing is read, weighed before the step or reported: the policy of each update decides."""
    bypass = MismatchCorrection(MismatchArguments(mismatch_recipe="bypass_pg_is").chosen(is_exact=True))
    inside_BR = torch.ones(1, 2, dtype=torch.bool)
    drawn = DrawnTokens(inside_BR, inside_BR.sum(-1), torch.zeros(1, 2))
    assert bypass.bypasses and not bypass.reads_old_policy
    assert bypass.corrected(None, drawn, torch.ones(1, dtype=torch.bool)) == Corrected()
    assert bypass.measures(torch.zeros(1, 2), drawn, Corrected()) == []
    weights_M = bypass.loss_weights(torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(weights_M, torch.tensor([0.3, 0.3]).exp())


def test_without_one_the_distance_is_reported():
    none = MismatchCorrection(MismatchSettings("none"))
    inside_BR = torch.ones(1, 2, dtype=torch.bool)
    drawn = DrawnTokens(inside_BR, inside_BR.sum(-1), torch.zeros(1, 2))
    assert none.corrected(torch.zeros(1, 2), drawn, inside_BR[:, 0]) == Corrected()
    assert none.loss_weights(torch.zeros(2), torch.zeros(2, dtype=torch.int64)) is None
    names = {
        name for measure in none.measures(torch.zeros(1, 2), drawn, Corrected()) for name in measure.shows.values()
    }
    assert "rollout/logprob_mismatch" in names and "mismatch/weight_mean" not in names
