"""A micro-batch of another trainer as it is watched: inputs, forwards, losses.

N rows, T their tokens with padding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


@dataclass
class WatchedForward:
    """A forward of a model. logprobs_NT: of each token, 0 where the model gave none; None of a model with scores.
    mask_NT: bool, the labels that count by TRL's head. scores_N: of a model with one output."""

    ids_NT: torch.Tensor
    real_NT: torch.Tensor
    of_reference: bool
    has_graph: bool
    logprobs_NT: torch.Tensor | None = None
    mask_NT: torch.Tensor | None = None
    scores_N: torch.Tensor | None = None


@dataclass
class WatchedMicroBatch:
    """inputs: as compute_loss was given them. items: num_items_in_batch. loss: that training_step returned.
    backward_loss: that the backward pass began with. sums, ref_sums: log-probabilities of responses, chosen and then
    rejected, where the trainer computes them in a method. point: that marked responses are compared with."""

    inputs: dict[str, Any]
    items: float | None
    forwards: list[WatchedForward] = field(default_factory=list)
    sums: torch.Tensor | None = None
    ref_sums: torch.Tensor | None = None
    loss: float = float("nan")
    backward_loss: float = float("nan")
    point: float | None = None

    @property
    def own(self) -> WatchedForward | None:
        """The trained model's forward, the last one with a graph."""
        return next((forward for forward in reversed(self.forwards) if forward.has_graph), None)

    def without_graph(self, ids_NT: torch.Tensor, of_reference: bool) -> WatchedForward | None:
        """The forward of these tokens."""
        for forward in self.forwards:
            if forward.of_reference == of_reference and not forward.has_graph and torch.equal(forward.ids_NT, ids_NT):
                return forward
        return None


def copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def at_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return [N, T] from [N, T - 1] of the places that predict: each number at its token."""
    return functional.pad(values.detach().cpu(), (1, 0))


def fit(values_NT: torch.Tensor, width: int) -> torch.Tensor:
    """Return [N, width], from rows that end as these do."""
    return functional.pad(values_NT, (max(0, width - values_NT.shape[1]), 0))[:, -width:].float()


@torch.no_grad()
def read_forward(
    positional: tuple[Any, ...], given: Mapping[str, Any], output: Any, *, of_reference: bool, temperature: float
) -> WatchedForward | None:
    """Read a forward by its arguments and its output; None without token ids.

    TRL's head gives log-probabilities, which are those of the temperature; from logits they are computed here.
    """
    ids_NT = given.get("input_ids", positional[0] if positional else None)
    if not isinstance(ids_NT, torch.Tensor) or ids_NT.ndim != 2:
        return None
    has_graph = False
    real_NT = given.get("attention_mask")
    real_NT = real_NT if isinstance(real_NT, torch.Tensor) and real_NT.ndim == 2 else torch.ones_like(ids_NT)
    found = WatchedForward(copied(ids_NT), copied(real_NT).bool(), of_reference, has_graph)
    given_logprobs, logits = getattr(output, "log_probs", None), getattr(output, "logits", None)
    if given_logprobs is not None:
        found.has_graph, found.logprobs_NT = given_logprobs.requires_grad, at_tokens(given_logprobs)
        mask = getattr(output, "label_mask", None)
        found.mask_NT = None if mask is None else at_tokens(mask).bool()
    elif isinstance(logits, torch.Tensor) and logits.shape[-1] == 1:
        found.has_graph, found.scores_N = logits.requires_grad, copied(logits.reshape(len(ids_NT), -1)[:, -1])
    elif isinstance(logits, torch.Tensor) and logits.ndim == 3:
        found.has_graph, width = logits.requires_grad, logits.shape[1]
        targets_NT = ids_NT[:, 1:][:, -(width - 1) :]
        rows = [_taken(row / temperature, ids) for row, ids in zip(logits[:, :-1], targets_NT, strict=True)]
        found.logprobs_NT = fit(torch.stack(rows).cpu(), ids_NT.shape[1])
    return found


def _taken(logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(logits_TV.float(), dim=-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1)
