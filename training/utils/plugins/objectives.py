"""Entries of the tables of advantage estimators, policy losses and preference losses. A plugin adds to them; a user's
file may have an estimator or a policy loss, or its function alone. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

    loss: (PolicyTokens, PolicyLossSettings) -> (loss_M, clipped_M), see `step3_ppo.losses.losses`.
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


@dataclass(frozen=True)
class FirstPass:
    """A number that a loss needs of the whole optimizer step, on all ranks, before its gradients: read without
    gradients, by the policy as it is before the step.

    sums: (Responses) -> sums over them, by name.
    point: (the sums over the step) -> `Responses.reference_point`.
    reads_mismatched: the responses are those of other rows (`preference.batches`); otherwise the rows' own.
    """

    sums: Callable[..., dict[str, float | torch.Tensor]]
    point: Callable[[Mapping[str, float]], float]
    reads_mismatched: bool = False


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss on ranked or marked responses.

    note: on it, for `--help`.
    of_margins: (margins_Q, Objective) -> loss_Q. A margin is the difference of a pair's log-ratios.
    of_responses: (Responses, Objective) -> the sum of all prompts' losses, for a loss on more than margins.
    rows: the kind of rows that it trains on.
    flags: a dataclass of the flags that it has for itself, if any.
    is_token_mean: a response's log-ratio is averaged over its tokens.
    needs_reference: without one log-ratios are log-probabilities, and no reference is read.
    loss_of_equal_pairs: in nats, that of a model to which the responses of a pair are alike, of losses whose rise to it
        shows that nothing is learned.
    first_pass: what it needs of a step before its gradients, if anything.
    mark_advice: (good, bad responses to train on, the values of its flags) -> a line on weights that do not balance
        them, or None.
    """

    note: str
    of_margins: Callable[..., torch.Tensor] | None = None
    flags: type | None = None
    is_token_mean: bool = False
    needs_reference: bool = True
    loss_of_equal_pairs: Callable[..., float] | None = None
    of_responses: Callable[..., torch.Tensor] | None = None
    rows: str = "ranked"
    first_pass: FirstPass | None = None
    mark_advice: Callable[[int, int, Any], str | None] | None = None
