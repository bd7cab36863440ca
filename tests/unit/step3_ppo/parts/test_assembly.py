"""The parts of the trainer that flags make, and where its models come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from training.step3_ppo.flags.arguments import PpoArguments
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.step3_ppo.parts.settings import _plan, wanted_score_scale
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.loading.configurations import ScoreScale, set_score_scale
from training.utils.models.row_sharing import RowSharing
from training.utils.setup.guests import GuestFeatures


@pytest.mark.parametrize(
    ("bound", "packed", "expected"), [(None, False, None), (None, True, 3 * 50), (70, False, 70), (70, True, 70)]
)
def test_a_rank_lays_out_its_own_sequences(bound, packed, expected):
    ppo = PpoArguments(per_device_training_batch_size=3, max_tokens_per_micro_batch=bound, share_beginnings=9)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestFeatures())
    plan = _plan(flags, tiny_causal_lm("llama"), packed, Ranks(0, 0, 1, torch.device("cpu")))  # hidden size 32
    assert plan == PlanSettings(
        1, expected, 3, packed, max_row_tokens=50, quadratic_tokens=192.0, least_shared_tokens=9
    )


@pytest.mark.parametrize(
    ("device", "reuses", "shared_by", "most"),
    [("cpu", False, 1, 2048), ("cpu", True, 1, 2048), ("cuda", False, 1, 3000), ("cpu", False, 2, 3000)],
)
def test_forwards_on_a_cpu_are_small_but_where_rows_are_shared(device, reuses, shared_by, most):
    """60 sequences of 50 tokens are 3,000."""
    ppo = PpoArguments(per_device_training_batch_size=60, reuse_forwards=reuses)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestFeatures())
    ranks = Ranks(0, 0, 1, torch.device(device), sharing=RowSharing(shared_by))
    plan = _plan(flags, tiny_causal_lm("llama"), True, ranks)
    assert plan.max_tokens_per_micro_batch == most


def test_the_scale_of_scores_is_read_where_it_is_asked_for(tmp_path):
    roles = RolesArguments(critic_model_name_or_path=str(tmp_path))
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    assert wanted_score_scale(roles, PpoArguments()) is None
    asked = PpoArguments(normalize_reward_scores=True)
    with pytest.raises(ThreestepError, match="--normalize_reward_scores needs threestep_score_mean and .*with step 2"):
        wanted_score_scale(roles, asked)
    set_score_scale(config, ScoreScale(1.5, 0.5))
    config.save_pretrained(tmp_path)
    assert wanted_score_scale(roles, asked) == ScoreScale(1.5, 0.5)
    assert wanted_score_scale(roles, PpoArguments()) is None
