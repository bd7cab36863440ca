"""Experience of responses with paths: every estimator takes drawn tokens alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.unit.step3_ppo.experience.test_experience import PAD, how, made_from, roles  # noqa: F401, F811
from threestep.plugins.parallel_thinking.tests.test_drawing import TAGS, model_that_thinks, roll
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.contracts.settings import ExperienceSettings, LengthSettings
from training.step3_ppo.experience.scoring import outcome_scores
from training.step3_ppo.experience.sequences import training_sequences
from training.utils.contracts.rollout import Rollout
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.token_model import PolicyModel, Readout

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def with_paths(roles) -> tuple[Rollout, SimpleNamespace]:  # noqa: F811
    """Four samples of each of two prompts, drawn path by path by an actor that likes tags."""
    model = model_that_thinks()
    drawn = roll(model, lengths=(3, 5), samples=4)
    assert drawn.inserted_BR.any(dim=1).sum() >= 4
    return drawn, SimpleNamespace(**{**vars(roles), "actor": PolicyModel(model)})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"remax", "none"}))
def test_every_estimator_takes_drawn_tokens_alone(with_paths, name, packed):
    """As a response of the drawn tokens, one behind the other. Actor and rollout have the same log-probabilities."""
    rollout, roles = with_paths  # noqa: F811
    drawn, settings = rollout.drawn, how(
        temperature=1.0, samples_per_prompt=4, estimator=ESTIMATORS[name], length=LengthSettings(24),
        plan=PlanSettings(1, 300, 8, packed, 300, form=TAGS),
    )  # fmt: skip
    made = made_from(rollout, roles, settings)
    assert torch.allclose(made.old_logprobs_BR, drawn.logprobs_BR, atol=1e-5)
    kl_BR = 0.1 * (made.old_logprobs_BR - made.read.ref_logprobs_BR)
    assert torch.allclose((made.rewards_BR + kl_BR).sum(dim=1), made.scored.scores_B, atol=1e-5)
    for field in (made.rewards_BR, made.advantages_BR, made.read.values_BR):
        assert field.shape == drawn.mask_BR.shape and not field[~drawn.mask_BR].any()
    inputs = AdvantageInputs(
        made.rewards_BR, drawn.lengths_B, torch.tensor([0] * 4 + [1] * 4), made.read.values_BR,
        logprobs_BR=made.old_logprobs_BR, collisions_BR=_collisions(rollout, roles.actor, settings),
    )  # fmt: skip
    wanted_BR, _ = ESTIMATORS[name].estimate(inputs, settings.advantage)
    assert torch.allclose(made.advantages_BR, wanted_BR, atol=1e-5) and wanted_BR.any()
    for each in training_sequences([made], 4, 0, 1):
        targets = int(each.tokens.is_target.sum())
        assert targets == len(each.advantages_r) == len(each.old_logprobs_r) < len(each.tokens)


def _collisions(rollout: Rollout, actor: PolicyModel, settings: ExperienceSettings) -> torch.Tensor:
    mask_BR = rollout.drawn.mask_BR
    found = [
        actor(rows, Readout(collisions=True)).collisions_M
        for sequence in rollout.sequences()
        for _, rows in rank_share([sequence], SequenceLayout(settings.layout.plan, PAD, 0), torch.device("cpu"))
    ]
    return torch.zeros(mask_BR.shape).masked_scatter(mask_BR, torch.cat(found).detach().float())


def test_a_response_of_paths_is_as_long_as_its_longest(with_paths):
    """What --max_answer_seq_len bounds, and the punishment of long responses reads."""
    rollout, _ = with_paths
    settings = LengthSettings(24, overlong_buffer_tokens=24, overlong_penalty=1.0)
    punished_B = outcome_scores(rollout, torch.zeros(8), settings)
    assert torch.allclose(punished_B, -rollout.formed.positions_B.float() / 24)
    assert (rollout.response_lengths_B > rollout.formed.positions_B).any()
