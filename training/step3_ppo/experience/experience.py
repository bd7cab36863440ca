"""Rollouts and models -> Experience: parts 4 to 6 of the loop.

B sequences of this rank, R response tokens that were drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.advantages.whiten import moments, whiten
from training.step3_ppo.contracts.records import Experience
from training.step3_ppo.experience.reading import read_tokens
from training.step3_ppo.experience.scoring import beside
from training.step3_ppo.experience.token_rewards import kl_in_reward, token_rewards
from training.step3_ppo.mismatch.weights import corrected, old_policy
from training.utils.engine.ranks.collectives import summed

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Samples
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.run.phase_clock import PhaseClock


def make_experience(
    samples: Samples,
    roles: Roles,
    settings: ExperienceSettings,
    kl_coef: float,
    *,
    clock: PhaseClock,
    greedy: Samples | None = None,
) -> Experience:
    """Parts 4 to 6: log-probabilities and values, rewards of tokens, advantages. A collective: all ranks call.

    greedy: one greedy response to each prompt, for an estimator that needs it. Scores are collected after the forwards,
    during which reward functions may run.
    """
    rollout, drawn = samples.rollout, samples.rollout.drawn
    cut_count = not settings.scoring.length.mask_truncated_responses
    counts_B = torch.ones_like(rollout.ended_B) if cut_count else rollout.ended_B
    with clock.phase("4_read"):
        read, reusable = read_tokens(rollout, roles, settings)
    old_BR = old_policy(read.logprobs_BR, drawn, settings.mismatch)
    with clock.phase("5_rewards"):
        scored = samples.scored
        group_B = torch.arange(len(counts_B), device=counts_B.device) // settings.samples_per_prompt
        kl = None
        if not settings.kl.in_loss:
            kl = kl_in_reward(rollout, old_BR, read, settings.kl.estimator, dtype=roles.actor_model.dtype)
        rewards_BR = token_rewards(samples, group_B, kl, kl_coef, settings=settings)
    with clock.phase("6_advantages"):
        correction = corrected(old_BR, drawn, counts_B, settings.mismatch, over_ranks=summed)
        inputs = AdvantageInputs(
            rewards_BR,
            drawn.lengths_B,
            group_B,
            read.values_BR,
            None if greedy is None else beside(scored, greedy.scored, settings.samples_per_prompt),
            read.logprobs_BR,
            read.collisions_BR,
            correction.weights_BR,
            over_ranks=summed,
        )
        advantages_BR, returns_BR = settings.estimator.estimate(inputs, settings.advantage)
        if settings.whiten_advantages:
            learns_BR = drawn.mask_BR & counts_B.unsqueeze(1)
            advantages_BR = whiten(advantages_BR, learns_BR, summed(moments(advantages_BR, learns_BR)))
    return Experience(
        rollout, scored, counts_B, rewards_BR, advantages_BR, returns_BR, read, old_BR, correction, reusable
    )
