"""Requests for forwards of training clients, of a seed; and the adapters of one as layers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.tiny_models import VOCABULARY
from threestep.plugins.tinker.adapters import ALPHA
from threestep.plugins.tinker.losses import LOSSES
from threestep.plugins.tinker.records import ForwardOrder, TrainingDatum


def order_of(seed: int, loss: str, lengths: Sequence[int], targets: int = 1, **more: Any) -> ForwardOrder:
    """Data of these lengths. more: other fields of the request."""
    dice, data = torch.Generator().manual_seed(seed), []
    for length in lengths:
        inputs = {
            "weights": torch.rand(length, targets, generator=dice),
            "logprobs": -3 - torch.rand(length, targets, generator=dice),
            "advantages": torch.randn(length, targets, generator=dice),
        }
        ids, wanted = (torch.randint(3, VOCABULARY, shape, generator=dice) for shape in ((length,), (length, targets)))
        data.append(TrainingDatum(ids, wanted, {key: inputs[key] for key in LOSSES[loss].needs}, targets == 1))
    return ForwardOrder(tuple(data), loss, **more)


def filled(layout, seed):
    """Weights whose B is not 0, so that both get gradients."""
    dice = torch.Generator().manual_seed(seed)
    return layout.new(seed, torch.float64) + 0.05 * torch.randn(sum(layout.sizes), generator=dice, dtype=torch.float64)


class Written(torch.nn.Module):
    """A linear layer with an adapter, as in Hu et al. 2021."""

    def __init__(self, base, down, up):
        super().__init__()
        self.base, self.down, self.up = base, torch.nn.Parameter(down.clone()), torch.nn.Parameter(up.clone())

    def forward(self, given):
        return self.base(given) + ALPHA / len(self.down) * (given @ self.down.T) @ self.up.T


def written_out(model, layout, weights_P) -> list[torch.nn.Parameter]:
    """Give a model a client's adapters as layers; return their weights in the order of the vector."""
    learned: list[torch.nn.Parameter] = []
    for name, (down, up) in layout.pieces(weights_P.unsqueeze(0)).items():
        parent, _, leaf = name.rpartition(".")
        place = model.get_submodule(parent) if parent else model
        layer = Written(getattr(place, leaf), down[0], up[0])
        setattr(place, leaf, layer)
        learned += [layer.down, layer.up]
    return learned
