"""Rollouts and models -> Experience: parts 3 to 6 of the loop.

B sequences of this rank, R response tokens that were drawn, M of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.step3_ppo.advantages.inputs import AdvantageInputs, evened, spread
from training.step3_ppo.advantages.whiten import moments, whiten
from training.step3_ppo.contracts.records import Experience, Forward, Samples, Scored, sequence_number
from training.step3_ppo.experience.exchange import read_balanced
from training.step3_ppo.experience.reward_shaping import shaped_rewards
from training.step3_ppo.experience.rounding import of_kl, of_logprobs
from training.step3_ppo.mismatch.weights import corrected
from training.utils.contracts.documents import first_alike
from training.utils.engine.ranks.collectives import gathered, summed
from training.utils.rewards.weighted import environment_weight

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import TokenLogprobs
    from training.utils.run.phase_clock import PhaseClock


def make_experience(
    samples: Samples,
    greedy: Samples | None,
    roles: Roles,
    settings: ExperienceSettings,
    kl_coef: float,
    clock: PhaseClock,
) -> Experience:
    """Parts 4 to 6: log-probabilities and values, rewards of tokens, advantages. A collective: all ranks call.

    greedy: one greedy response to each prompt, for an estimator that needs it. Scores are collected after the forwards,
    during which reward functions may run.
    """
    rollout = samples.rollout
    mask_BR, lengths_B, sampled_BR, turns_BR = rollout.drawn
    counts_B = rollout.ended_B if settings.length.mask_truncated_responses else torch.ones_like(rollout.ended_B)
    with clock.phase("4_read"):
        read, reusable = _per_token(rollout, roles, settings)
    old_BR, ref_BR, values_BR = (read.get(name) for name in ("old", "reference", "values"))
    policy_BR = old_BR if settings.reads_collisions else None
    bypasses = settings.mismatch is not None and settings.mismatch.bypass
    if bypasses:
        old_BR = torch.where(mask_BR, sampled_BR.float(), 0.0)
    with clock.phase("5_rewards"):
        scored = samples.scored
        if turns_BR is not None:
            turns_BR = environment_weight(settings.rewards.named) * turns_BR
        group_B = torch.arange(len(lengths_B), device=lengths_B.device) // settings.samples_per_prompt
        kl = _kl_in_reward(rollout, old_BR, ref_BR, read.get("kl"), roles, settings)
        if kl is not None:
            kl = _meaning(kl, scored.outcomes_B, group_B, settings)
        kl_BR = torch.zeros(mask_BR.shape, device=mask_BR.device) if kl is None else kl.values_BR
        rewards_BR = shaped_rewards(scored.outcomes_B, kl_BR, lengths_B, kl_coef, turns_BR)
        if kl is not None:
            rewards_BR = evened(rewards_BR, lengths_B, kl_coef * kl.rounding_B, group_B)
    with clock.phase("6_advantages"):
        greedy_scores_B = None
        if greedy is not None:
            greedy_scores_B = _beside(scored, greedy.scored, settings.samples_per_prompt)
        weights_BR = kept_BR = None
        if settings.mismatch is not None and not bypasses:
            assert old_BR is not None  # reads_old_logprobs is True wherever there is a correction
            weights_BR, kept_BR = corrected(old_BR, sampled_BR, mask_BR, counts_B, settings.mismatch, over_ranks=summed)
        inputs = AdvantageInputs(
            rewards_BR,
            lengths_B,
            group_B,
            values_BR,
            greedy_scores_B,
            policy_BR,
            read.get("collisions"),
            weights_BR,
            over_ranks=summed,
        )
        advantages_BR, returns_BR = settings.estimator.estimate(inputs, settings.advantage)
        if settings.whiten_advantages:
            learns_BR = mask_BR & counts_B.unsqueeze(1)
            advantages_BR = whiten(advantages_BR, learns_BR, summed(moments(advantages_BR, learns_BR)))
    return Experience(
        rollout=rollout,
        scores_B=scored.scores_B,
        counts_B=counts_B,
        rewards_BR=rewards_BR,
        advantages_BR=advantages_BR,
        old_logprobs_BR=old_BR,
        ref_logprobs_BR=ref_BR,
        values_BR=values_BR,
        returns_BR=returns_BR,
        weights_BR=weights_BR,
        kept_BR=kept_BR,
        score_norms_BR=_score_norms(policy_BR, read.get("collisions"), mask_BR) if settings.reports_variance else None,
        outcomes_B=scored.outcomes_B,
        reward_parts=scored.parts,
        reusable=reusable,
    )


class _RoundedKl(NamedTuple):
    """values_BR: float32, of response tokens. rounding_B: float32, how far rounding may move their sums.
    is_rounding: no log-probability of this rank is farther from the reference's than rounding."""

    values_BR: torch.Tensor
    rounding_B: torch.Tensor
    is_rounding: bool


def _kl_in_reward(
    rollout: Rollout,
    old_BR: torch.Tensor | None,
    ref_BR: torch.Tensor | None,
    exact_BR: torch.Tensor | None,
    roles: Roles,
    settings: ExperienceSettings,
) -> _RoundedKl | None:
    """Return the KL to the reference, None where it is in the loss; one for equal responses to a prompt: the rounding
    of their forwards differs. exact_BR: of logits."""
    if settings.kl.in_loss or old_BR is None or ref_BR is None:
        return None
    mask_BR, estimator = rollout.drawn.mask_BR, settings.kl.estimator
    nats_BR = of_logprobs(ref_BR, roles.actor_model.dtype)
    kl_BR = estimator.estimate(old_BR, ref_BR) if exact_BR is None else exact_BR
    rounding_BR = torch.where(mask_BR, of_kl(estimator, old_BR, ref_BR, kl_BR, nats_BR), 0.0)
    is_rounding = not bool(((old_BR - ref_BR).abs() > nats_BR)[mask_BR].any())
    first_B = first_alike(rollout.sequences())
    return _RoundedKl(kl_BR[first_B], rounding_BR.square().sum(dim=1).sqrt()[first_B], is_rounding)


def _meaning(
    kl: _RoundedKl, outcomes_B: torch.Tensor, group_B: torch.Tensor, settings: ExperienceSettings
) -> _RoundedKl:
    """Return 0 where the KL is rounding on all ranks and no outcomes are compared that differ; otherwise the KL, with
    no rounding where outcomes of a group differ: they teach, however much the KL is rounded. A collective."""
    is_apart_B = spread(outcomes_B, group_B) > 0.0
    compared_B = is_apart_B.float() if settings.estimator.needs_groups else outcomes_B
    ranks = gathered((kl.is_rounding, float(compared_B.amin()), float(compared_B.amax()), bool(is_apart_B.any())))
    all_rounding, least, most, are_apart = zip(*ranks, strict=True)
    if all(all_rounding) and min(least) == max(most) and not any(are_apart):
        return kl._replace(values_BR=torch.zeros_like(kl.values_BR))
    return kl._replace(rounding_B=torch.where(is_apart_B, 0.0, kl.rounding_B))


def _beside(scored: Scored, greedy: Scored, samples_per_prompt: int) -> torch.Tensor:
    """Return the score of the greedy response to each sample's prompt: the sample's score if the two differ by rounding
    alone, as those of one text do that two forwards scored."""
    greedy_B, rounding_B = (
        each_G.repeat_interleave(samples_per_prompt) for each_G in (greedy.outcomes_B, greedy.rounding_B)
    )
    own_B = scored.outcomes_B
    return torch.where((own_B - greedy_B).abs() <= torch.maximum(rounding_B, scored.rounding_B), own_B, greedy_B)


def _score_norms(
    logprobs_BR: torch.Tensor | None, collisions_BR: torch.Tensor | None, mask_BR: torch.Tensor
) -> torch.Tensor:
    """Return 1 - 2 p + sum of p^2 on response tokens, 0 elsewhere."""
    assert logprobs_BR is not None and collisions_BR is not None  # read where the variance is reported
    return torch.where(mask_BR, 1.0 - 2.0 * logprobs_BR.exp() + collisions_BR, 0.0)


def _per_token(
    rollout: Rollout, roles: Roles, settings: ExperienceSettings
) -> tuple[dict[str, torch.Tensor], list[Forward]]:
    """Return the models' numbers of this rank's response tokens by name, float32 [B, R], 0 elsewhere; and the forwards
    with their graphs, if these are reused."""
    mask_BR = rollout.drawn.mask_BR
    reusable: list[Forward] = []

    def read(indices: Sequence[int], rows: TokenRows) -> dict[str, torch.Tensor]:
        policy, values_M, others = _read(rows, roles, settings)
        if settings.reuses_forwards:
            assert policy is not None  # reads_old_logprobs is True wherever forwards are reused
            # Indices count through the ranks, which have equally many sequences.
            places = (divmod(index, len(mask_BR)) for index in indices)
            each, ranks = settings.samples_per_prompt, settings.plan.ranks
            numbers = [sequence_number(rank, index, each, ranks) for rank, index in places]
            reusable.append(Forward(numbers, rows, policy, values_M))
        trained = {"old": None if policy is None else policy.logprobs_M, "values": values_M}
        return others | {name: values.detach() for name, values in trained.items() if values is not None}

    # Forwards that learn run in training mode: only there activations may be recomputed.
    with contextlib.nullcontext() if settings.reuses_forwards else roles.reading(), torch.no_grad():
        read_values = read_balanced(
            rollout.sequences(), settings, read, lambda sequence: int(sequence.is_target.sum()), mask_BR.device
        )
    nothing_BR = torch.zeros(mask_BR.shape, device=mask_BR.device)
    # Targets come in the order of the sequences, those of each in the order of its text: row-major in the mask.
    return {name: nothing_BR.masked_scatter(mask_BR, values.float()) for name, values in read_values.items()}, reusable


def _read(
    rows: TokenRows, roles: Roles, settings: ExperienceSettings
) -> tuple[TokenLogprobs | None, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the old policy, the critic's values (None where not wanted), and by name the reference's log-probabilities
    and the exact KL; of one micro-batch, float32 [M] each. Actor and critic have graphs if forwards are reused."""
    of_logits = settings.kl.estimator.of_logits and not settings.kl.in_loss
    policy = values_M = None
    with torch.set_grad_enabled(settings.reuses_forwards):
        if settings.reads_old_logprobs:
            wanted = {"with_logits": of_logits, "with_collisions": settings.reads_collisions}
            policy = roles.actor(rows, settings.temperature, settings.with_entropy, **wanted)
        if roles.critic is not None:
            values_M = roles.critic(rows, at="targets")
    others: dict[str, torch.Tensor] = {}
    if policy is not None and policy.collisions_M is not None:
        others["collisions"] = policy.collisions_M
    if roles.reference is not None:
        reference = roles.reference(rows, settings.temperature, with_logits=of_logits)
        others["reference"] = reference.logprobs_M
        if of_logits:  # reads_old_logprobs is True wherever the reward has a KL
            assert policy is not None
            others["kl"] = settings.kl.estimator.estimate(policy.logits_MV, reference.logits_MV)
            policy = policy._replace(logits_MV=None)
    return policy, values_M, others
