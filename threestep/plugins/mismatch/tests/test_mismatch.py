"""The correction of a run by its flags: how it is spelt, and what is refused before anything loads."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.mismatch.arguments import MismatchArguments
from threestep.plugins.mismatch.checks import check
from threestep.plugins.mismatch.correction import MismatchCorrection, correction
from threestep.plugins.mismatch.recipes import RECIPES, REJECTIONS
from threestep.plugins.mismatch.settings import MismatchSettings, Rejection, rejection_of
from training.step3_ppo.contracts.records import Corrected
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import DrawnTokens
from training.utils.flags.added import NO_FLAGS
from training.utils.flags.flags import note_mistakes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("seq_mean_k1:0.999:1.001", Rejection("seq_mean_k1", 0.999, 1.001)),
        ("token_k1:4", Rejection("token_k1", 0.25, 4.0)),
        ("seq_max_k3:0.01", Rejection("seq_max_k3", None, 0.01)),
    ],
)
def test_spellings(given, expected):
    assert rejection_of(given) == expected


PAGE = Path(__file__).parents[1] / "README.md"


def mistakes_of(arguments: MismatchArguments) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound_and_do_nothing():
    assert mistakes_of(MismatchArguments()) == []
    assert not MismatchArguments().chosen(is_exact=True).acts and MismatchArguments().chosen(is_exact=False).acts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mismatch_veto": 1.0}, "--mismatch_veto expects more than 0 and less than 1, got 1.0"),
        (
            {"mismatch_rejection": ["token_k4:1"]},
            "--mismatch_rejection expects KIND:UPPER or, for k1, KIND:LOWER:UPPER, .*, where KIND is one of "
            f"{', '.join(REJECTIONS)}, got 'token_k4:1'; choose one of these",
        ),
        (
            {"mismatch_rejected": "leave"},
            "--mismatch_rejected leave needs .* or --mismatch_veto, but neither is set; add",
        ),
        (
            {"mismatch_recipe": "bypass_pg_is", "mismatch_normalize": True},
            "--mismatch_normalize needs statistics of the whole optimizer step, but --mismatch_bypass weights",
        ),
        (
            {"mismatch_bypass": True, "mismatch_veto": 0.1, "mismatch_rejected": "leave"},
            "--mismatch_rejected leave needs statistics of the whole optimizer step, but --mismatch_bypass",
        ),
        ({"mismatch_threshold": 1.0}, "--mismatch_threshold expects more than 1, got 1.0"),
        ({"mismatch_correction": "clip"}, "--mismatch_correction expects one of none, truncate, mask, got 'clip'"),
        ({"mismatch_level": "row"}, "--mismatch_level expects one of token, sequence, geometric, got 'row'"),
    ],
)
def test_mistakes(given, said):
    [sentence] = mistakes_of(MismatchArguments(**given))
    assert re.match(said, sentence)


def spelt(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_recipe(name):
    recipe = RECIPES[name]
    flags = ", ".join(f"`{flag} {spelt(value)}`" for flag, value in recipe.flags.items())
    assert f"| `{name}` | {flags} | {recipe.when} |" in PAGE.read_text(encoding="utf-8").splitlines()


WEIGHS_AGAIN = (
    "with --mismatch_bypass, the ratio in --policy_loss ppo is already relative to the rollout's policy, so --m"
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"mismatch_recipe": "bypass_pg_is"}, WEIGHS_AGAIN),
        ({"mismatch_recipe": "bypass_pg_is", "policy_loss": "gpg"}, None),
        ({"mismatch_recipe": "bypass_pg_is", "policy_loss": "gppg"}, None),  # noted with the other names
        (
            {"mismatch_level": "sequence"},
            "--mismatch_level sequence applies to the weights of a correction, but --mismatch_correction is none; set",
        ),
        ({"mismatch_level": "sequence", "rollout_engine": "vllm"}, None),  # corrected by default
        ({"mismatch_bypass": True, "rollout_engine": "vllm"}, WEIGHS_AGAIN),
    ],
)
def test_what_does_not_go_together(given, said):
    mistakes = Mistakes()
    check(ppo_flags(**given), mistakes)
    check(SimpleNamespace(added=NO_FLAGS), mistakes)  # other steps have nothing to correct
    assert len(mistakes.sentences) == (said is not None) and all(each.startswith(said) for each in mistakes.sentences)


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


@pytest.mark.parametrize(
    "given",
    ["token_k1", "token_k1:", "token_k1:x", "token_k1:0.5", "token_k1:1.1:2", "token_k1:2:0.5", "token_k1:0:2",
     "token_k2:0.1:0.2", "seq_mean_k3:0", "seq_mean_k3:-1", "token_k1:0.5:2:3", "seq_sum_k1:nan",
     "token_k4:1", "k1:1", "", "geometric:1.001"],
)  # fmt: skip
def test_spellings_that_are_refused(given):
    """For its bounds, or as a kind that is unknown."""
    kind = given.split(":")[0]
    words = f"and {kind} needs .*" if kind in REJECTIONS else "where KIND is one of token_k1, .*"
    with pytest.raises(ThreestepError, match=f"{words}, got '{given}'"):
        rejection_of(given)


def test_the_lower_bound_and_what_acts():
    assert MismatchSettings("mask", threshold=4.0).least == 0.25
    assert MismatchSettings("mask", threshold=4.0, threshold_lower=0.1).least == 0.1
    assert not MismatchSettings("none").acts
    assert all(each.acts for each in (MismatchSettings("mask"), MismatchSettings("none", veto=0.1),
                                      MismatchSettings("none", bypass=True)))  # fmt: skip
