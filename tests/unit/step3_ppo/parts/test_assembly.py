"""The parts of the trainer that flags make, and where its models come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM, MixtralForSequenceClassification

from tests.invariants import tiny
from tests.support.plain_roles import plain_roles
from tests.support.tiny_models import tiny_causal_lm, tiny_config
from training.step3_ppo.flags.arguments import PpoArguments
from training.step3_ppo.flags.reuse import ROLES
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.step3_ppo.parts.assembly import with_guests
from training.step3_ppo.parts.settings import _plan, wanted_score_scale
from training.step3_ppo.roles.roles import Roles
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.loading.score_scale import ScoreScale, set_score_scale
from training.utils.setup.guests import GuestSettings


@pytest.mark.parametrize(
    ("bound", "packed", "expected"), [(None, False, None), (None, True, 3 * 50), (70, False, 70), (70, True, 70)]
)
def test_a_rank_lays_out_its_own_sequences(bound, packed, expected):
    ppo = PpoArguments(per_device_training_batch_size=3, max_tokens_per_micro_batch=bound, share_beginnings=9)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestSettings())
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
    sizes: Any = {"per_device_training_batch_size": 60, "sequence_parallel_size": shared_by}
    ppo = PpoArguments(**sizes, reuse_forwards=reuses)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestSettings())
    plan = _plan(flags, tiny_causal_lm("llama"), True, Ranks(0, 0, 1, torch.device(device)))
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


def roles_of(actor: bool, critic: bool) -> Roles:
    """With a mixture of experts as actor, as critic, or both."""
    roles, _ = plain_roles(None)
    for engine, is_mixture, make in (
        (roles.actor, actor, lambda: MixtralForCausalLM(tiny.mixture())),
        (
            roles.critic,
            critic,
            lambda: MixtralForSequenceClassification(tiny.mixture(num_labels=1, router_aux_loss_coef=0.0)),
        ),
    ):
        if is_mixture:
            engine.module.model = make()
    return roles


def balanced(mixtures: tuple[bool, bool], given: float | None, **reused: str) -> Roles:
    settings = GuestSettings(given)
    return with_guests(roles_of(*mixtures), settings, path="", total_steps=1, seed=0, reused=reused)


@pytest.mark.parametrize(
    ("mixtures", "given", "coefficients"),
    [
        ((True, True), None, [0.7, None]),  # the critic's own is 0
        ((True, True), 0.3, [0.3, 0.3]),
        ((True, False), 0.3, [0.3, None]),
        ((False, True), 0.3, [None, 0.3]),
        ((True, True), 0.0, [None, None]),
        ((False, False), None, [None, None]),
    ],
)
def test_whose_routers_are_balanced(mixtures, given, coefficients):
    roles = balanced(mixtures, given)
    losses = (roles.actor_guests, roles.critic_guests)
    assert [guests[0].balance.coefficient if guests else None for guests in losses] == coefficients


def test_a_coefficient_with_nothing_to_balance():
    with pytest.raises(ThreestepError, match="--router_aux_loss_coef expects a mixture of experts .* LlamaForCausalLM"):
        balanced((False, False), 0.3)


@pytest.mark.parametrize("name", ROLES)
def test_forwards_that_are_reused_know_no_load_of_the_step(name):
    reused = {name: ROLES[name]}
    mixtures = (ROLES[name] == "actor", ROLES[name] == "critic")
    with pytest.raises(ThreestepError, match=f"--{name} learns from .*; give --router_aux_loss_coef 0, or leave"):
        balanced(mixtures, 0.3, **reused)
    balanced(mixtures, 0.0, **reused)
    balanced(mixtures[::-1], 0.3, **reused)
