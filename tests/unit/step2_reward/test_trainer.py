"""What the loop reports beside the loss; the loop itself is held against plain PyTorch in tests/invariants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.step2_reward.trainer import RewardTrainer
from training.utils.data.phases import ResponsesRow
from training.utils.engine.loop import LoopSettings
from training.utils.layout.planner import PlanSettings
from training.utils.models.flops import ComputeMeter, ModelShape

# Ten weights a token, a head of 2, attention of width 1: 60 FLOPs a token, 12 a score, 12 a pair of tokens.
METER = ComputeMeter(ModelShape(10, 0, 2, 0, attention_width=1), peak_flops_per_second=1000.0)


def trainer(packed: bool, meter: ComputeMeter | None) -> RewardTrainer:
    plan = PlanSettings(ranks=1, packed=packed)
    settings = LoopSettings(1, 1, plan, plan, eval_interval=0, pad_token_id=0, seed=0, meter=meter)
    nothing: Any = SimpleNamespace(ranks=None)
    return RewardTrainer(nothing, [], [], settings, nothing)


def test_the_share_of_the_peak_counts_a_shared_prompt_once():
    # A prompt of 3 with responses of 2 and 1: 6 tokens, and 6 + (2 x 3 + 3) + (3 + 1) = 19 pairs; unshared 5 + 4
    # tokens and 15 + 10 pairs. Two scores. In two seconds at a peak of 1,000.
    row = ResponsesRow(0, np.array([5, 6, 7]), (np.array([8, 9]), np.array([4])))
    shared = trainer(packed=True, meter=METER)._mfu([row], seconds=2.0)
    assert shared == {"train/mfu": pytest.approx((60 * 6 + 12 * 19 + 12 * 2) / 2000)}
    alone = trainer(packed=False, meter=METER)._mfu([row], seconds=2.0)
    assert alone == {"train/mfu": pytest.approx((60 * 9 + 12 * 25 + 12 * 2) / 2000)}
    assert trainer(packed=True, meter=None)._mfu([row], seconds=2.0) == {}
