"""An actor and a critic that learn side by side, on one trunk or apart."""

from __future__ import annotations

from typing import Any

import torch

from training.utils.contracts.token_rows import TokenRows
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.models.weights import adapters_off


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def read_while_learning(actor: Any, critic: Any, rows: TokenRows, steps: int) -> list[torch.Tensor]:
    """Take steps of Adam on a loss of each; return, for each step, the log-probabilities of the actor with its adapters
    off, with them, and the values, as they were before it."""
    policy, scalar = PolicyModel(actor), ScalarModel(critic)
    optimizers = [torch.optim.AdamW(trained(model).values(), lr=0.01) for model in (actor, critic)]
    read = []
    for _ in range(steps):
        with torch.no_grad(), adapters_off(actor):
            read.append(policy(rows).logprobs_M)
        logprobs_M, values_M = policy(rows).logprobs_M, scalar(rows, at="targets")
        read += [logprobs_M.detach(), values_M.detach()]
        (-logprobs_M.sum()).backward()
        (values_M - 1).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return read
