"""The moving average counts every step that changed the weights, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threestep.plugins.ema.arguments import AverageArguments
from threestep.plugins.ema.feature import AverageFeature
from threestep.plugins.ema.guest import KeptAverage
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


@pytest.fixture
def engine() -> Any:
    module = torch.nn.Linear(3, 1, bias=False)
    settings, ranks = SimpleNamespace(zero_stage=0), SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    return SimpleNamespace(module=module, engine=None, settings=settings, ranks=ranks, updates=0)


def test_a_skipped_step_leaves_the_average_alone(engine):
    guest = KeptAverage(engine, 0.75)
    (start_3,) = (share.clone() for share in guest.average.shares)
    for applied, share in ((False, 0.0), (True, 0.25)):
        step = guest.begin([], lambda index, rows: None, None)
        with torch.no_grad():
            engine.module.weight.add_(float(applied))
        engine.updates += applied
        assert step.end("actor", {}) == {}
        torch.testing.assert_close(guest.average.shares[0], start_3 + share)
    assert not guest.adds_to_loss


def test_there_is_one_where_the_flags_ask_for_it(engine):
    assert AverageFeature().open([(engine, None)], "", 1, 0) == ()
    (guest,) = AverageFeature(0.5).open([(engine, None), (None, None)], "", 1, 0)
    assert guest.other_weights.folder == "model_ema"


def test_the_decay_is_a_share():
    mistakes = Mistakes()
    note_mistakes(AverageArguments(ema_decay=1.0), mistakes)
    assert mistakes.sentences == ["--ema_decay expects more than 0 and less than 1, got 1.0"]
