"""Adapters as a vector: their order, their first weights, and a description without layers."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.tinker.adapters import AdaptedLayer, AdaptedModel, AdapterLayout, RowShares
from threestep.plugins.tinker.records import LoraSpec
from training.utils.base.errors import ThreestepError

LAYOUT = AdapterLayout(2, (AdaptedLayer("a", "mlp", 3, 4), AdaptedLayer("b", "head", 5, 2)))


def test_pieces_follow_one_another():
    stack = torch.arange(2 * sum(LAYOUT.sizes)).view(2, -1)
    parts = [part for pair in LAYOUT.pieces(stack).values() for part in pair]
    assert [tuple(part.shape) for part in parts] == [(2, 2, 3), (2, 4, 2), (2, 2, 5), (2, 2, 2)]
    assert torch.cat([part.flatten(1) for part in parts], dim=1).equal(stack)


def test_first_weights_are_of_the_seed_and_add_nothing():
    first = LAYOUT.new(5, torch.float32)
    assert first.equal(LAYOUT.new(5, torch.float32)) and not first.equal(LAYOUT.new(6, torch.float32))
    for down, up in LAYOUT.pieces(first.unsqueeze(0)).values():
        assert not up.any() and float(down.abs().max()) <= down.shape[-1] ** -0.5 and down.all()


@pytest.mark.parametrize(
    ("clients", "take", "put"),
    [([0, 0, 1, 1], None, None), ([0, 1, 1], [0, 0, 1, 2], [0, 2, 3]), ([1, 0], [1, 0], [1, 0]), ([0], None, None)],
)
def test_rows_are_dealt_to_their_clients(clients, take, put):
    shares = RowShares.of(clients, torch.device("cpu"))
    assert [None if part is None else part.tolist() for part in (shares.take, shares.put)] == [take, put]


def test_a_client_trains_something():
    with pytest.raises(ThreestepError, match="expected parts of the model that have linear layers, .*, got none;"):
        AdaptedModel(tiny_causal_lm("llama")).layout(LoraSpec(2, 0, ()))
