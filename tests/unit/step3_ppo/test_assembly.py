"""The parts of the trainer that flags make, and where its models come from."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from training.step3_ppo.arguments import PpoArguments
from training.step3_ppo.assembly import _plan, wanted_score_scale
from training.step3_ppo.roles_arguments import RolesArguments
from training.utils.layout.planner import PlanSettings
from training.utils.loading.score_scale import ScoreScale, set_score_scale
from training.utils.run.errors import ThreestepError


@pytest.mark.parametrize(
    ("bound", "packed", "expected"), [(None, False, None), (None, True, 3 * 50), (70, False, 70), (70, True, 70)]
)
def test_a_rank_lays_out_its_own_sequences(bound, packed, expected):
    ppo = PpoArguments(per_device_training_batch_size=3, max_tokens_per_micro_batch=bound)
    plan = _plan(ppo, 50, tiny_causal_lm("llama"), packed, 1)  # hidden size 32
    assert plan == PlanSettings(1, expected, 3, packed, max_row_tokens=50, quadratic_tokens=192.0)


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
