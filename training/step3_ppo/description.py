"""Figures of rollouts and experiences, over all ranks.

B sequences, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from training.step3_ppo.dynamic_sampling import equal_groups
from training.step3_ppo.mismatch import clipped_tokens, mismatch_sums
from training.step3_ppo.records import Experience
from training.step3_ppo.scoring import outcome_scores
from training.step3_ppo.settings import ExperienceSettings
from training.utils.engine.collectives import gathered, summed_numbers


def described(
    experiences: Sequence[Experience], settings: ExperienceSettings, device: torch.device
) -> dict[str, float]:
    """Return means over tokens, responses or groups; a field that an experience lacks has no figure. A collective."""
    sums: dict[str, float | torch.Tensor] = {}
    for experience in experiences:
        for name, value in _sums(experience, settings).items():
            sums[name] = sums.get(name, 0.0) + (value.double() if isinstance(value, torch.Tensor) else value)
    total = summed_numbers(sums, device)
    tokens, responses = total.pop("tokens"), total.pop("responses")
    figures = {
        "rollout/tokens": tokens + total.pop("prompt_tokens"),
        "rollout/response_tokens": tokens / responses,
    }
    equal = total.pop("equal_groups")
    if settings.samples_per_prompt > 1:
        figures["rollout/equal_groups"] = equal * settings.samples_per_prompt / responses
    figures |= {name: value / responses for name, value in total.items() if name in _A_RESPONSE}
    figures |= {name: value / tokens for name, value in total.items() if name not in _A_RESPONSE}
    return figures | reward_means(experiences)


def reward_means(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return `reward/NAME`, the mean of each reward and of each value that a function gave, over the responses that
    have it. A collective; ranks may have different names."""
    found: dict[str, list[float]] = {}
    for experience in experiences:
        for name, part_B in experience.reward_parts.items():
            found.setdefault(name, []).extend(value for value in part_B.tolist() if not math.isnan(value))
    own = {name: (sum(values), len(values)) for name, values in found.items()}
    everyone = gathered(own)
    means = {}
    for name in sorted({name for part in everyone for name in part}):
        parts = [part[name] for part in everyone if name in part]
        if count := sum(count for _, count in parts):
            means[f"reward/{name}"] = sum(total for total, _ in parts) / count
    return means


# The other figures are means over tokens.
_A_RESPONSE = (
    "rollout/score", "rollout/outcome", "rollout/kl", "rollout/ended_share", "rollout/left_out",
    "mismatch/perplexity_ratio",
)  # fmt: skip


def _sums(experience: Experience, settings: ExperienceSettings) -> dict[str, float | torch.Tensor]:
    """Return this rank's sums, under the names of their means."""
    rollout, mask_BR = experience.rollout, experience.rollout.response_mask_BR
    old_BR, ref_BR, sampled_BR = experience.old_logprobs_BR, experience.ref_logprobs_BR, rollout.sampled_logprobs_BR
    outcomes_B = outcome_scores(rollout, experience.scores_B, settings.length)
    sums: dict[str, float | torch.Tensor] = {
        "responses": float(mask_BR.shape[0]),
        "tokens": mask_BR.sum(),
        "prompt_tokens": rollout.prompt_mask_BP.sum(),
        "equal_groups": equal_groups(outcomes_B, settings.samples_per_prompt).sum(),
        "rollout/score": experience.scores_B.sum(),
        "rollout/outcome": outcomes_B.sum(),
        "rollout/ended_share": rollout.ended_B.sum(),
        "rollout/left_out": (~experience.counts_B).sum(),
        # E[-log p(token)] over tokens drawn from p: an estimate of the entropy that costs no forward.
        "rollout/entropy": -sampled_BR.sum(),
    }
    if ref_BR is not None:  # without a training forward, from the rollout's own log-probabilities
        sums["rollout/kl"] = ((sampled_BR if old_BR is None else old_BR) - ref_BR).sum()
    if old_BR is not None:
        found = mismatch_sums(old_BR, sampled_BR, mask_BR)
        sums["rollout/logprob_mismatch"] = found.pop("absolute")
        sums |= {f"mismatch/{name}": value for name, value in found.items()}
        if settings.mismatch is not None:
            sums["mismatch/clipped_share"] = clipped_tokens(old_BR, sampled_BR, mask_BR, settings.mismatch)
    if experience.values_BR is not None and experience.returns_BR is not None:
        sums["critic/value_mean"] = experience.values_BR.sum()
        sums["critic/return_mean"] = experience.returns_BR.sum()
    return sums
