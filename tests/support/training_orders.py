"""Requests for forwards of training clients, of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.tiny_models import VOCABULARY
from training.serve_training.losses import LOSSES
from training.serve_training.records import ForwardOrder, TrainingDatum


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
