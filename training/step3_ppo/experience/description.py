"""Figures of rollouts and experiences, over all ranks.

B sequences, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.advantages.inputs import discounted_sums
from training.step3_ppo.contracts.measures import NOTHING, Measure, Moments, figures_of, moments, spread
from training.step3_ppo.experience.dynamic_sampling import equal_groups
from training.utils.contracts.rollout import CUTS, FAILURES
from training.utils.engine.ranks.collectives import gathered

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Experience, Readings
    from training.step3_ppo.contracts.settings import ExperienceSettings


def described(experiences: Sequence[Experience], settings: ExperienceSettings) -> dict[str, float]:
    """Return statistics over tokens, responses or groups; a field that an experience lacks has no figure. A
    collective."""
    each = [_measures(experience, settings) for experience in experiences]
    of_rank = [_joined(parts) for parts in zip(*(moments(measures) for measures in each), strict=True)]
    of_all = [_joined(parts) for parts in zip(*gathered(of_rank), strict=True)]
    figures = figures_of(each[0], of_all)
    figures |= _explained_variance(figures) | settings.correction.figures(figures)
    return figures | reward_means(experiences) | conversation_means(experiences)


def _joined(parts: Sequence[Moments]) -> Moments:
    return reduce(Moments.joined, parts, NOTHING)


def _explained_variance(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the returns' variance that the critic's values explain, 1 - Var(returns - values) /
    Var(returns): 1 for a perfect critic, 0 for a constant one; none without one, or where all returns are equal."""
    returns = figures.get("critic/return_std", 0.0)
    return {"critic/explained_variance": 1.0 - (figures["critic/error_std"] / returns) ** 2} if returns > 0 else {}


def reward_means(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return `reward/NAME`, the mean of each reward and of each function's further values, over the responses that have
    it. A collective; ranks may have different names."""
    values: dict[str, list[float]] = {}
    for experience in experiences:
        for name, part_B in experience.scored.parts.items():
            values.setdefault(name, []).extend(value for value in part_B.tolist() if not math.isnan(value))
    return {f"reward/{name}": mean for name, mean in _means(values).items()}


def conversation_means(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return means over conversations: of their turns and forks, of the shares that each limit and a failure ended, and
    of the environments' figures, as environment/NAME, 0 for a conversation that lacks one. A collective where there are
    conversations."""
    records = [record for experience in experiences for record in experience.rollout.records]
    if not records:  # on all ranks alike: one engine draws for all
        return {}
    means = {"conversation/turns": [float(record.turns) for record in records]}
    means |= {"conversation/forks": [float(record.forks) for record in records]}
    means |= {f"conversation/cut_by_{cut}": [float(record.cut == cut) for record in records] for cut in CUTS}
    means["conversation/aborted_share"] = [float(record.figures.get(FAILURES, 0) > 0) for record in records]
    names = {
        name for part in gathered(sorted({name for record in records for name in record.figures})) for name in part
    }
    means |= {f"environment/{name}": [record.figures.get(name, 0.0) for record in records] for name in sorted(names)}
    return _means(means)


def _means(numbers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each name's numbers over all ranks, of which each may have other names. A collective."""
    everyone = gathered({name: (sum(values), len(values)) for name, values in numbers.items()})
    means = {}
    for name in sorted({name for part in everyone for name in part}):
        parts = [part[name] for part in everyone if name in part]
        if count := sum(count for _, count in parts):
            means[name] = sum(total for total, _ in parts) / count
    return means


def _measures(experience: Experience, settings: ExperienceSettings) -> list[Measure]:
    """Return the measures of one experience, the same list for each experience and rank."""
    rollout, mask_BR = experience.rollout, experience.rollout.drawn.mask_BR
    read, old_BR, sampled_BR = experience.read, experience.old_logprobs_BR, rollout.drawn.logprobs_BR
    lengths_B, prompts_B = rollout.response_lengths_B.float(), rollout.prompt_mask_BP.sum(dim=1).float()
    measures = [
        Measure(lengths_B + prompts_B, {"total": "rollout/tokens"}),
        # One number a rank: before its sequences are dealt anew (`learning` has what ranks compute).
        Measure((lengths_B + prompts_B).sum(dim=0, keepdim=True), spread("rollout/rank_tokens")),
        Measure(rollout.drawn.lengths_B, {"total": "rollout/drawn_tokens"}),
        Measure(lengths_B, spread("rollout/response_tokens", mean="rollout/response_tokens")),
        Measure(~rollout.ended_B, {"mean": "rollout/clipped_share"}),
        Measure(rollout.ended_B & (lengths_B == 1), {"mean": "rollout/empty_share"}),
        Measure(prompts_B, spread("rollout/prompt_tokens")),
        Measure(experience.scored.scores_B, spread("rollout/score", mean="rollout/score")),
        # With the KL's part, where the reward has one.
        Measure(experience.rewards_BR.double().sum(dim=1), spread("rollout/reward", mean="rollout/reward")),
        Measure(rollout.ended_B, {"mean": "rollout/ended_share"}),
        Measure(~experience.counts_B, {"mean": "rollout/left_out"}),
        Measure(experience.advantages_BR[mask_BR], spread("rollout/advantage")),
        # E[-log p(token)] over tokens drawn from p: an estimate of the entropy that costs no forward.
        Measure(-sampled_BR[mask_BR], {"mean": "rollout/entropy"}),
    ]
    if settings.scoring.length.max_prompt_tokens is not None:
        measures.append(
            Measure(prompts_B >= settings.scoring.length.max_prompt_tokens, {"mean": "rollout/full_prompt_share"})
        )
    if settings.reports_variance:
        norms_BR = score_norms(read, mask_BR)
        power_B = (experience.advantages_BR.square() * norms_BR).sum(dim=1)
        measures.append(Measure(power_B, {"mean": "variance/power"}))
        measures.append(Measure(norms_BR.sum(dim=1), {"mean": "variance/energy"}))
    form = settings.layout.plan.form
    if rollout.formed is not None and form is not None:
        measures += [
            Measure(rollout.formed.inserted_BR.any(dim=1), {"mean": f"rollout/{form.figure}"}),
            Measure(
                rollout.formed.positions_B, spread("rollout/response_positions", mean="rollout/response_positions")
            ),
        ]
    measures.append(Measure(experience.scored.outcomes_B, {"mean": "rollout/outcome"}))
    if settings.samples_per_prompt > 1:
        equal = equal_groups(experience.scored.outcomes_B, settings.samples_per_prompt)
        measures.append(Measure(equal, {"mean": "rollout/equal_groups"}))
    if read.ref_logprobs_BR is not None:  # without a training forward, from the rollout's log-probabilities
        kl_BR = (sampled_BR if old_BR is None else old_BR) - read.ref_logprobs_BR
        measures.append(Measure(torch.where(mask_BR, kl_BR, 0.0).sum(dim=1), {"mean": "rollout/kl"}))
    if old_BR is not None:
        measures += settings.correction.measures(old_BR, rollout.drawn, experience.corrected)
    if read.experts_differ_BR is not None:
        measures.append(Measure(read.experts_differ_BR[mask_BR], {"mean": "mismatch/experts_differ"}))
    if experience.returns_BR is None:  # no critic learns from them
        returns_BR = discounted_sums(torch.where(mask_BR, experience.rewards_BR, 0.0), settings.advantage.gamma)
        measures.append(Measure(returns_BR[mask_BR], spread("rollout/return")))
    if read.values_BR is not None and experience.returns_BR is not None:
        values_M, returns_M = read.values_BR[mask_BR], experience.returns_BR[mask_BR]
        measures += [
            Measure(values_M, spread("critic/value")),
            Measure(returns_M, spread("critic/return")),
            Measure(returns_M - values_M, {"mean": "critic/error_mean", "std": "critic/error_std"}),
        ]
    return measures


def score_norms(read: Readings, mask_BR: torch.Tensor) -> torch.Tensor:
    """Return 1 - 2 p + the sum of p^2 over the vocabulary on response tokens, the square of the gradient of log p by
    the logits; 0 elsewhere."""
    assert read.logprobs_BR is not None and read.collisions_BR is not None  # read where the variance is reported
    return torch.where(mask_BR, 1.0 - 2.0 * read.logprobs_BR.exp() + read.collisions_BR, 0.0)
