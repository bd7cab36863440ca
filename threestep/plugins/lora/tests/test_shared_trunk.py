"""A scalar model on a language model's trunk reads what a scalar model of its own with the same weights reads."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.lora_settings import lora_settings
from tests.support.tiny_models import FAMILIES, tiny_causal_lm
from tests.support.two_roles import read_while_learning, trained
from threestep.plugins.lora.shared_trunk import scalar_model_on_trunk
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import join
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import prepared
from training.utils.models.token_model import ScalarModel

ROWS = padded_rows([join(torch.tensor(p), torch.tensor(r)) for p, r in (([5, 9], [3, 4, 7]), ([8], [6, 3]))], 0)
ACTOR, CRITIC = lora_settings("", lora_dim=3), lora_settings("", lora_dim=2, lora_alpha=6.0)


def drawn(model, seed: int):
    """What trains, also what starts with 0, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def shared(family: str):
    actor = tiny_causal_lm(family, torch.float64)
    critic = scalar_model_on_trunk(actor, CRITIC, pad_token_id=1)
    return prepared(actor, ACTOR), critic.eval()


def apart(family: str):
    """The same without anything in common."""
    actor = tiny_causal_lm(family, torch.float64)
    config = copy.deepcopy(actor.config)
    config.num_labels = 1
    critic = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).eval()
    critic.base_model.load_state_dict(actor.base_model.state_dict())
    return prepared(actor, ACTOR), prepared(critic, CRITIC)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_reads_and_learns_as_two_separate_models_do(family):
    """A few steps of Adam on both losses, in float64: equal to the last bit, as the sums are the same ones."""
    numbers, weights = [], []
    for make in (shared, apart):
        actor, critic = make(family)
        drawn(actor, 1), drawn(critic, 2)
        numbers.append(read_while_learning(actor, critic, ROWS, steps=3))
        weights.append([*trained(actor).values(), *trained(critic).values()])
    assert all(one.equal(other) for one, other in zip(*numbers, strict=True))
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))
    references = numbers[0][0::3]
    assert all(read.equal(references[0]) for read in references)
    assert not numbers[0][1].equal(numbers[0][4]) and not numbers[0][2].equal(numbers[0][5])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trunk_is_there_once_and_all_that_trains_is_of_one_model(family):
    actor, critic = shared(family)
    frozen = {weight.data_ptr() for weight in actor.base_model.parameters() if not weight.requires_grad}
    assert {weight.data_ptr() for weight in critic.base_model.parameters() if not weight.requires_grad} == frozen
    theirs = [{weight.data_ptr() for weight in trained(model).values()} for model in (actor, critic)]
    assert not theirs[0] & theirs[1] and not (theirs[0] | theirs[1]) & frozen
    assert all(".lora_" in name or name.startswith("score.") for name in trained(critic)) and "score.weight" in trained(
        critic
    )
    assert critic.base_model.config is critic.config is not actor.config


def test_a_new_critic_values_everything_at_0():
    _, critic = shared("llama")
    assert ScalarModel(critic)(ROWS, at="targets").eq(0).all()
    assert (critic.config.num_labels, critic.config.pad_token_id) == (1, 1)


def test_each_model_has_dropout_of_its_own():
    actor = tiny_causal_lm("gpt2")
    critic = scalar_model_on_trunk(actor, lora_settings("", lora_dim=2, dropout=0.5), pad_token_id=1)
    rates = [{m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} for model in (actor, critic)]
    assert rates == [{0.0}, {0.5}]


def test_a_family_without_a_scalar_head():
    model = tiny_causal_lm("mamba")
    with pytest.raises(ThreestepError, match="--share_trunk: transformers has no scalar head for the trunk of"):
        scalar_model_on_trunk(model, CRITIC, pad_token_id=1)
