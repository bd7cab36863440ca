"""Rollouts and models -> Experience: parts 4 to 6 of the loop.

B sequences of this rank, R response tokens that were drawn, M of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.advantages.estimators import moments, whiten
from training.step3_ppo.advantages.inputs import AdvantageInputs, shaped_rewards
from training.step3_ppo.contracts.records import Experience, Forward, Readings, Reused, sequence_number
from training.step3_ppo.experience.scoring import beside
from training.step3_ppo.experience.sequences import LearnValues, read_balanced, targets_of
from training.utils.base.transfer import moved
from training.utils.contracts.documents import first_alike
from training.utils.engine.ranks.collectives import summed
from training.utils.models.token_model import Readout
from training.utils.rewards.weighted import environment_weight

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Samples
    from training.step3_ppo.contracts.settings import ExperienceSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import TokenLogprobs
    from training.utils.run.phase_clock import PhaseClock


def make_experience(
    samples: Samples,
    roles: Roles,
    settings: ExperienceSettings,
    kl_coef: float,
    *,
    clock: PhaseClock,
    greedy: Samples | None = None,
    learn_values: LearnValues | None = None,
) -> Experience:
    """Parts 4 to 6: log-probabilities and values, rewards of tokens, advantages. A collective: all ranks call.

    greedy: one greedy response to each prompt, for an estimator that needs it. learn_values: the critic's part of 7, if
    it learns as it reads. Scores are collected after the forwards, during which reward functions may run.
    """
    rollout, drawn = samples.rollout, samples.rollout.drawn
    cut_count = not settings.scoring.length.mask_truncated_responses
    counts_B = torch.ones_like(rollout.ended_B) if cut_count else rollout.ended_B
    with clock.phase("4_read"):
        read, reused = read_tokens(rollout, roles, settings, learn_values is None)
    old_BR = read.logprobs_BR
    if settings.correction.bypasses:
        old_BR = torch.where(drawn.mask_BR, drawn.logprobs_BR.float(), 0.0)
    with clock.phase("5_rewards"):
        scored = samples.scored
        group_B = torch.arange(len(counts_B), device=counts_B.device) // settings.samples_per_prompt
        rewards_BR = token_rewards(samples, old_BR, read, kl_coef, settings=settings)
    if learn_values is not None:
        with clock.phase("7_learn"):
            learnt = learn_values(rollout, rewards_BR, counts_B)
        read, reused = replace(read, values_BR=learnt.values_BR), reused._replace(values=learnt)
    with clock.phase("6_advantages"):
        corrected = settings.correction.corrected(old_BR, drawn, counts_B)
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
            corrected.weights_BR,
            over_ranks=summed,
        )
        advantages_BR, returns_BR = settings.estimator.estimate(inputs, settings.advantage)
        if settings.whiten_advantages:
            learns_BR = drawn.mask_BR & counts_B.unsqueeze(1)
            advantages_BR = whiten(advantages_BR, learns_BR, summed(moments(advantages_BR, learns_BR)))
    return Experience(rollout, scored, counts_B, rewards_BR, advantages_BR, returns_BR, read, old_BR, corrected, reused)


def token_rewards(
    samples: Samples, old_BR: torch.Tensor | None, read: Readings, kl_coef: float, *, settings: ExperienceSettings
) -> torch.Tensor:
    """Return rewards_BR of an Experience: the outcomes at the responses' ends, what turns earned at theirs, and the KL
    to the reference where it is part of the reward. Waits for the scores."""
    drawn, kl, turns_BR = samples.rollout.drawn, settings.kl, samples.rollout.drawn.turn_rewards_BR
    kl_BR = torch.zeros(drawn.mask_BR.shape, device=drawn.mask_BR.device)
    if not kl.in_loss and old_BR is not None and read.ref_logprobs_BR is not None:
        kl_BR = kl.estimator.estimate(old_BR, read.ref_logprobs_BR) if read.kl_BR is None else read.kl_BR
        kl_BR = kl_BR[first_alike(samples.rollout.sequences())]  # equal responses differ in their forwards' rounding
    if turns_BR is not None:
        turns_BR = environment_weight(settings.scoring.rewards.named) * turns_BR
    return shaped_rewards(samples.scored.outcomes_B, kl_BR, drawn.lengths_B, kl_coef, turns_BR=turns_BR)


def read_tokens(
    rollout: Rollout, roles: Roles, settings: ExperienceSettings, with_values: bool = True
) -> tuple[Readings, Reused]:
    """Return the models' numbers of this rank's response tokens, with_values the critic's too; and the forwards with
    the actor's graphs, if these are reused. A collective."""
    mask_BR, reuses = rollout.drawn.mask_BR, settings.reading.reuses_forwards
    reusable: list[Forward] = []

    def read(indices: Sequence[int], laid_out: TokenRows) -> dict[str, torch.Tensor]:
        rows = moved(laid_out, mask_BR.device)
        policy, others = _read(rows, roles, settings)
        if reuses:
            reusable.append(Forward(_numbers(indices, len(mask_BR), settings), rows, policy))
        if with_values and roles.critic is not None:
            others["values"] = roles.critic(rows, at="targets")
        return others

    # Forwards that learn run in training mode: only there activations may be recomputed.
    with contextlib.nullcontext() if reuses else roles.reading(), torch.no_grad():
        values = read_balanced(
            rollout.sequences(), settings.layout, partial(starmap, read), count=targets_of, device=mask_BR.device
        )
    nothing_BR = torch.zeros(mask_BR.shape, device=mask_BR.device)
    # Targets come in the order of the sequences, those of each in the order of its text: row-major in the mask.
    found = {f"{name}_BR": nothing_BR.masked_scatter(mask_BR, own.float()) for name, own in values.items()}
    return Readings(**found), Reused(reusable)


def _read(
    rows: TokenRows, roles: Roles, settings: ExperienceSettings
) -> tuple[TokenLogprobs | None, dict[str, torch.Tensor]]:
    """Return the old policy (None where not wanted), and by name the numbers of others of one micro-batch, float32 [M]
    each. The policy has its graph if forwards are reused."""
    reading, kl = settings.reading, settings.kl
    of_logits = kl.estimator.of_logits and not kl.in_loss
    policy = None
    if reading.reads_old_logprobs:
        readout = Readout(reading.temperature, reading.with_entropy, of_logits, reading.with_collisions)
        with torch.set_grad_enabled(reading.reuses_forwards):
            policy = roles.actor(rows, readout)
    others: dict[str, torch.Tensor] = {} if policy is None else {"logprobs": policy.logprobs_M.detach()}
    if policy is not None and roles.experts is not None:
        differ_t = roles.experts.differing()
        others["experts_differ"] = (
            torch.zeros_like(policy.logprobs_M) if differ_t is None else differ_t[rows.predictor_M].float()
        )
    if policy is not None and policy.collisions_M is not None:
        others["collisions"] = policy.collisions_M
    if roles.reference is not None:
        reference = roles.reference(rows, Readout(reading.temperature, logits=of_logits))
        others["ref_logprobs"] = reference.logprobs_M
        if of_logits:  # reads_old_logprobs is True wherever the reward has a KL
            assert policy is not None
            others["kl"] = kl.estimator.estimate(policy.logits_MV, reference.logits_MV)
            policy = policy._replace(logits_MV=None)
    return policy, others


def _numbers(indices: Sequence[int], sequences: int, settings: ExperienceSettings) -> list[int]:
    """Return the numbers (`sequence_number`) of sequences whose indices count through the ranks, each of which has as
    many `sequences`."""
    places = (divmod(index, sequences) for index in indices)
    each, ranks = settings.samples_per_prompt, settings.layout.plan.ranks
    return [sequence_number(rank, index, each, ranks) for rank, index in places]
