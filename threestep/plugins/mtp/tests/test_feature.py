"""A head among the features of a run."""

from __future__ import annotations

import pytest

from threestep.plugins.mtp.feature import HeadFeature
from threestep.plugins.mtp.settings import MtpSettings
from training.utils.base.errors import Mistakes


def test_without_a_head_nothing_is_asked():
    none, mistakes = HeadFeature(MtpSettings()), Mistakes()
    none.check_media(mistakes)
    assert mistakes.sentences == [] and none.needs_segments is None and not none.lends_guesser
    assert none.reuse_obstacle() is None and none.planned(None, None, 1, None) == ([], [], [])


def test_a_head_needs_a_model_that_takes_a_mask_of_segments():
    head = HeadFeature(MtpSettings(2))
    assert head.needs_segments == "--mtp_num_layers 2" and head.lends_guesser
    assert head.exact_weights() == {"--mtp_num_layers 2": "whose head starts as a layer of exact weights"}


@pytest.mark.parametrize(
    ("in_rollouts", "why"),
    [
        (
            False,
            "--mtp_num_layers 1 does not go with rows that have images: the head reads embeddings of tokens, which "
            "images do not have; use 0",
        ),
        (
            True,
            "--mtp_num_layers 1 does not go with prompts that have images: it reads embeddings of tokens, which images "
            "do not have; leave it out",
        ),
    ],
)
def test_a_head_reads_texts_alone(in_rollouts, why):
    mistakes = Mistakes()
    HeadFeature(MtpSettings(1), in_rollouts).check_media(mistakes)
    assert mistakes.sentences == [why]
