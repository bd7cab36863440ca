"""Rollouts and models -> Experience: parts 4 to 6 of the loop.

B sequences of this rank, R response tokens that were drawn, M of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.advantages.whiten import moments, whiten
from training.step3_ppo.contracts.records import Experience, Forward, Readings, sequence_number
from training.step3_ppo.experience.exchange import read_balanced
from training.step3_ppo.experience.scoring import beside
from training.step3_ppo.experience.token_rewards import kl_in_reward, token_rewards
from training.step3_ppo.mismatch.weights import NOT_CORRECTED, corrected, old_policy
from training.utils.engine.ranks.collectives import summed

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Samples
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import TokenLogprobs
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
        correction = NOT_CORRECTED
        if settings.mismatch is not None:
            correction = corrected(old_BR, drawn, counts_B, settings.mismatch, over_ranks=summed)
        if greedy is not None:
            read = replace(read, greedy_scores_B=beside(scored, greedy.scored, settings.samples_per_prompt))
        inputs = AdvantageInputs(
            rewards_BR,
            drawn.lengths_B,
            group_B,
            read.values_BR,
            read.greedy_scores_B,
            None if read.collisions_BR is None else read.logprobs_BR,
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


def read_tokens(rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> tuple[Readings, list[Forward]]:
    """Return the models' numbers of this rank's response tokens; and the forwards with their graphs, if these are
    reused. A collective."""
    mask_BR, reuses = rollout.drawn.mask_BR, settings.reading.reuses_forwards
    reusable: list[Forward] = []

    def read(indices: Sequence[int], rows: TokenRows) -> dict[str, torch.Tensor]:
        policy, values_M, others = _read(rows, roles, settings)
        if reuses:
            reusable.append(Forward(_numbers(indices, len(mask_BR), settings), rows, policy, values_M))
        trained = {"logprobs": None if policy is None else policy.logprobs_M, "values": values_M}
        return others | {name: values.detach() for name, values in trained.items() if values is not None}

    # Forwards that learn run in training mode: only there activations may be recomputed.
    with contextlib.nullcontext() if reuses else roles.reading(), torch.no_grad():
        values = read_balanced(
            rollout.sequences(),
            settings.layout,
            read,
            count=lambda sequence: int(sequence.is_target.sum()),
            device=mask_BR.device,
        )
    nothing_BR = torch.zeros(mask_BR.shape, device=mask_BR.device)
    # Targets come in the order of the sequences, those of each in the order of its text: row-major in the mask.
    found = {f"{name}_BR": nothing_BR.masked_scatter(mask_BR, own.float()) for name, own in values.items()}
    return Readings(**found), reusable


def _read(
    rows: TokenRows, roles: Roles, settings: ExperienceSettings
) -> tuple[TokenLogprobs | None, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the old policy, the critic's values (None where not wanted), and by name the other numbers of one
    micro-batch, float32 [M] each. Actor and critic have graphs if forwards are reused."""
    reading, kl = settings.reading, settings.kl
    of_logits = kl.estimator.of_logits and not kl.in_loss
    policy = values_M = None
    with torch.set_grad_enabled(reading.reuses_forwards):
        if reading.reads_old_logprobs:
            wanted = {"with_logits": of_logits, "with_collisions": reading.with_collisions}
            policy = roles.actor(rows, reading.temperature, reading.with_entropy, **wanted)
        if roles.critic is not None:
            values_M = roles.critic(rows, at="targets")
    others: dict[str, torch.Tensor] = {}
    if policy is not None and roles.experts is not None:
        differ_t = roles.experts.differing()
        others["experts_differ"] = (
            torch.zeros_like(policy.logprobs_M) if differ_t is None else differ_t[rows.predictor_M].float()
        )
    if policy is not None and policy.collisions_M is not None:
        others["collisions"] = policy.collisions_M
    if roles.reference is not None:
        reference = roles.reference(rows, reading.temperature, with_logits=of_logits)
        others["ref_logprobs"] = reference.logprobs_M
        if of_logits:  # reads_old_logprobs is True wherever the reward has a KL
            assert policy is not None
            others["kl"] = kl.estimator.estimate(policy.logits_MV, reference.logits_MV)
            policy = policy._replace(logits_MV=None)
    return policy, values_M, others


def _numbers(indices: Sequence[int], sequences: int, settings: ExperienceSettings) -> list[int]:
    """Return the numbers (`sequence_number`) of sequences whose indices count through the ranks, each of which has as
    many `sequences`."""
    places = (divmod(index, sequences) for index in indices)
    each, ranks = settings.samples_per_prompt, settings.layout.plan.ranks
    return [sequence_number(rank, index, each, ranks) for rank, index in places]
