"""Rollouts of prompts with pictures come back to the same pictures alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts
from threestep.plugins.images.pixels import ImagePixels
from threestep.plugins.images.prompts import PromptImages
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rollout_engine import RolloutRequest, rolled_out
from training.utils.contracts.rows import PromptRow
from training.utils.generation.decoding.hf import TransformersRollout


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm("llama")


def pictured(digest: str) -> RolloutRequest:
    ids_BP, mask_BP = prompts((3, 5))
    rows = [PromptRow(0, np.arange(3), "", None), PromptRow(1, np.arange(5), "", None, media_digests=(digest,))]
    images = PromptImages(((), (MediaSpan(1, 2),)), lambda keys: ImagePixels(torch.zeros(1)))
    return RolloutRequest(ids_BP, mask_BP, PLAIN, range(4), 2, rows, images)


def test_rollouts_of_other_pictures_are_refused(tmp_path, model):
    class Blind(TransformersRollout):
        def roll_out(self, model, request):
            return super().roll_out(model, replace(request, media=None))

    DumpingRollout(Blind(), tmp_path, 0).roll_out(model, pictured("ab12"))
    replayed = rolled_out(ReplayRollout(tmp_path, 0), model, pictured("ab12"))
    assert [each.media for each in replayed.sequences()] == [(), (), (MediaSpan(1, 2),), (MediaSpan(1, 2),)]
    for other in (pictured("cd34"), replace(pictured("ab12"), media=None)):
        with pytest.raises(ThreestepError, match="holds responses to prompts with other pictures than those that this"):
            ReplayRollout(tmp_path, 0).roll_out(model, other)
