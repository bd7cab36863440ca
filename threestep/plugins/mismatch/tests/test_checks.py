"""A correction beside the policy loss, and flags of one where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.mismatch.checks import check
from training.utils.base.errors import Mistakes
from training.utils.flags.added import NO_FLAGS

WEIGHS_AGAIN = (
    "--mismatch_bypass makes the ratio of --policy_loss ppo one to the rollout's policy, and --mismatch_correction "
    "truncate weighs by that ratio once more; give --policy_loss gpg, or --mismatch_correction none"
)


def told(**given) -> list[str]:
    mistakes = Mistakes()
    check(ppo_flags(**given), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({}, []),
        ({"mismatch_recipe": "bypass_pg_is"}, [WEIGHS_AGAIN]),
        ({"mismatch_recipe": "bypass_pg_is", "policy_loss": "gpg"}, []),
        ({"mismatch_recipe": "bypass_pg_is", "policy_loss": "gppg"}, []),  # noted with the other names
        (
            {"mismatch_level": "sequence"},
            [
                "--mismatch_level sequence is for the weights of a correction, and --mismatch_correction is none; give "
                "truncate or mask, or leave it out"
            ],
        ),
        ({"mismatch_level": "sequence", "rollout_engine": "vllm"}, []),  # corrected by default
        ({"mismatch_bypass": True, "rollout_engine": "vllm"}, [WEIGHS_AGAIN]),
    ],
)
def test_what_does_not_go_together(given, sentences):
    assert told(**given) == sentences


def test_other_steps_have_nothing_to_correct():
    mistakes = Mistakes()
    check(SimpleNamespace(added=NO_FLAGS), mistakes)
    assert mistakes.sentences == []
