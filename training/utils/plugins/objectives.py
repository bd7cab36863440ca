"""Entries of the tables of advantage estimators and policy losses. A plugin adds to them, and a user's file has one, or
its function alone. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages.

    estimate: (AdvantageInputs, AdvantageSettings) -> (advantages_BR, returns_BR), see `step3_ppo.advantages.inputs`.
    needs_critic: reads values.
    needs_groups: compares the samples of a prompt, so a prompt needs two or more.
    needs_greedy: reads the score of a greedy response.
    needs_policy: reads log-probabilities and collision probabilities of the policy that rolled out.
    whitens: by default, its advantages are whitened over the tokens of all ranks.
    norms: reads `--norm_adv_over`.
    returns_alone: a sequence's returns follow from its own rewards and values.
    flags: a dataclass of the flags that it alone reads, as `AdvantageSettings.options`.
    """

    estimate: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    needs_critic: bool = False
    needs_groups: bool = False
    needs_greedy: bool = False
    needs_policy: bool = False
    whitens: bool = False
    norms: bool = False
    returns_alone: bool = False
    flags: type | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of the policy.

    loss: (PolicyTokens, PolicyLossSettings) -> (loss_M, clipped_M), see `step3_ppo.losses.tokens`.
    aggregation, clip_low, clip_high: defaults, those of the loss's authors.
    has_ratio: the loss has the ratio of the new to the old policy, and so needs no other weight for it.
    unread: flags that other losses read and this one does not.
    flags: a dataclass of the flags that it alone reads, as `PolicyLossSettings.options`.
    selects: (TrainingSequences of all ranks, PolicyLossSettings, how many of their tokens count, a seed) -> bool [r] by
        the number of a sequence: tokens of an optimizer step that the loss treats apart. Called before its forwards.
    """

    loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    has_ratio: bool = True
    unread: tuple[str, ...] = ()
    flags: type | None = None
    selects: Callable[..., Mapping[int, torch.Tensor]] | None = None
