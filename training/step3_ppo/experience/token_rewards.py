"""Part 5 of the loop: the rewards of tokens, with the KL where it is part of the reward.

A KL that rounding alone has made counts as 0 where it would decide between responses that are alike.
B sequences of this rank, R response tokens that were drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from training.step3_ppo.advantages.inputs import evened, spread
from training.step3_ppo.experience.reward_shaping import shaped_rewards
from training.step3_ppo.experience.rounding import of_kl, of_logprobs
from training.utils.contracts.documents import first_alike
from training.utils.engine.ranks.collectives import gathered
from training.utils.rewards.weighted import environment_weight

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Readings, Samples
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.kl import KlEstimator
    from training.utils.contracts.rollout import Rollout


class RoundedKl(NamedTuple):
    """values_BR: float32, of response tokens. rounding_B: float32, how far rounding may move their sums.
    is_rounding: no log-probability of this rank is farther from the reference's than rounding."""

    values_BR: torch.Tensor
    rounding_B: torch.Tensor
    is_rounding: bool


def token_rewards(
    samples: Samples, group_B: torch.Tensor, kl: RoundedKl | None, kl_coef: float, *, settings: ExperienceSettings
) -> torch.Tensor:
    """Return rewards_BR of an Experience. group_B: equal for the samples of a prompt. kl: None where the reward has
    none. A collective."""
    drawn, outcomes_B, turns_BR = (
        samples.rollout.drawn,
        samples.scored.outcomes_B,
        samples.rollout.drawn.turn_rewards_BR,
    )
    if turns_BR is not None:
        turns_BR = environment_weight(settings.scoring.rewards.named) * turns_BR
    if kl is None:
        nothing_BR = torch.zeros(drawn.mask_BR.shape, device=drawn.mask_BR.device)
        return shaped_rewards(outcomes_B, nothing_BR, drawn.lengths_B, kl_coef, turns_BR=turns_BR)
    kl = _meaning(kl, outcomes_B, group_B, settings.estimator.needs_groups)
    rewards_BR = shaped_rewards(outcomes_B, kl.values_BR, drawn.lengths_B, kl_coef, turns_BR=turns_BR)
    return evened(rewards_BR, drawn.lengths_B, kl_coef * kl.rounding_B, group_B)


def kl_in_reward(
    rollout: Rollout, old_BR: torch.Tensor | None, read: Readings, estimator: KlEstimator, *, dtype: torch.dtype
) -> RoundedKl | None:
    """Return the KL to the reference, None without one; one for equal responses to a prompt: the rounding of their
    forwards differs. dtype: of the actor."""
    mask_BR, ref_BR = rollout.drawn.mask_BR, read.ref_logprobs_BR
    if old_BR is None or ref_BR is None:
        return None
    kl_BR = estimator.estimate(old_BR, ref_BR) if read.kl_BR is None else read.kl_BR
    nats_BR = of_logprobs(ref_BR, dtype)
    rounding_BR = torch.where(mask_BR, of_kl(estimator, old_BR, ref_BR, kl_BR, nats_BR=nats_BR), 0.0)
    is_rounding = bool(((old_BR - ref_BR).abs() <= nats_BR.nan_to_num(posinf=0.0))[mask_BR].all())
    first_B = first_alike(rollout.sequences())
    return RoundedKl(kl_BR[first_B], rounding_BR.square().sum(dim=1).sqrt()[first_B], is_rounding)


def _meaning(kl: RoundedKl, outcomes_B: torch.Tensor, group_B: torch.Tensor, needs_groups: bool) -> RoundedKl:
    """Return 0 where the KL is rounding on all ranks and no outcomes are compared that differ; otherwise the KL, with
    no rounding where outcomes of a group differ: they teach, however much the KL is rounded. A collective.

    needs_groups: outcomes are compared with those of their group alone
    """
    is_apart_B = spread(outcomes_B, group_B) > 0.0
    compared_B = is_apart_B.float() if needs_groups else outcomes_B
    ranks = gathered((kl.is_rounding, float(compared_B.amin()), float(compared_B.amax()), bool(is_apart_B.any())))
    all_rounding, least, most, are_apart = zip(*ranks, strict=True)
    if all(all_rounding) and min(least) == max(most) and not any(are_apart):
        return kl._replace(values_BR=torch.zeros_like(kl.values_BR))
    return kl._replace(rounding_B=torch.where(is_apart_B, 0.0, kl.rounding_B))
