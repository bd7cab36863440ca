"""Routers among the features of a run: whose are balanced, and whose forwards can be reused."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, MixtralForCausalLM, MixtralForSequenceClassification

from tests.families.configs import tiny_config
from tests.invariants import tiny
from tests.support.plain_roles import plain_roles
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.routers.checks import step_needs
from threestep.plugins.routers.feature import RoutersFeature
from training.step3_ppo.flags.checks import ROLES
from training.step3_ppo.parts.assembly import check_reused, with_guests
from training.step3_ppo.roles.roles import Roles
from training.utils.base.errors import ThreestepError
from training.utils.plugins.plugin import StepNeeds
from training.utils.setup.guests import GuestFeatures


@pytest.mark.parametrize(
    ("family", "coefficient", "twice"), [("llama", None, False), ("mixtral", None, True), ("mixtral", 0.0, False)]
)
def test_whose_forwards_are_read_twice(family, coefficient, twice):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert RoutersFeature(coefficient).reads_twice(model) == twice


def test_rollouts_record_experts_where_these_are_replayed():
    assert not RoutersFeature().records_experts and step_needs(ppo_flags()).own_forwards == ""
    assert RoutersFeature(replay="compare").records_experts
    needs = step_needs(ppo_flags(replay_routers="compare"))
    assert needs == StepNeeds({}, "experts are replayed (--replay_routers)")


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


def balanced(mixtures: tuple[bool, bool], given: float | None, **reused: bool) -> Roles:
    features = GuestFeatures([RoutersFeature(given)])
    roles = with_guests(roles_of(*mixtures), features, path="", total_steps=1, seed=0)
    check_reused(ppo_flags(**reused).ppo, roles)
    return roles


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
    reused = {name: True}
    mixtures = (ROLES[name] == "actor", ROLES[name] == "critic")
    with pytest.raises(ThreestepError, match=f"--{name} learns from .*; give --router_aux_loss_coef 0, or leave"):
        balanced(mixtures, 0.3, **reused)
    balanced(mixtures, 0.0, **reused)
    balanced(mixtures[::-1], 0.3, **reused)
