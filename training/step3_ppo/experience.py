"""Rollouts and models -> Experience: parts 3 to 6 of the loop.

B sequences of this rank, R response tokens, M response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.whiten import moments, whiten
from training.step3_ppo.kl import k1
from training.step3_ppo.records import Experience, Rollout
from training.step3_ppo.reward_shaping import shaped_rewards
from training.step3_ppo.roles import Roles
from training.utils.engine.collectives import largest, summed
from training.utils.layout.documents import TokenSequence, join, plain
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.models.score_scale import ScoreScale


@dataclass(frozen=True)
class ExperienceSettings:
    """Of parts 3 to 6; see the flags of the same names in arguments.py. score_scale: of --normalize_reward_scores; None
    leaves scores as they are."""

    temperature: float
    score_scale: ScoreScale | None
    clip_reward: float
    kl_coef: float
    advantage: str
    gamma: float
    lam: float
    whiten_advantages: bool
    plan: PlanSettings
    pad_token_id: int


def make_experience(rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> Experience:
    """Score, take log-probabilities and values, shape rewards, estimate advantages. A collective: all ranks call."""
    mask_BR = rollout.response_mask_BR
    with roles.reading(), torch.no_grad():
        scores_B = score(rollout, roles, settings)
        old_logprobs_BR = _per_token(rollout, settings, lambda rows: roles.actor(rows, settings.temperature).logprobs_M)
        ref_logprobs_BR = _per_token(
            rollout, settings, lambda rows: roles.reference(rows, settings.temperature).logprobs_M
        )
        values_BR = _per_token(rollout, settings, lambda rows: roles.critic(rows, at="targets"))
    rewards_BR = shaped_rewards(
        scores_B, k1(old_logprobs_BR, ref_logprobs_BR), rollout.response_lengths_B, settings.kl_coef
    )
    advantages_BR, returns_BR = ESTIMATORS[settings.advantage](
        rewards_BR, values_BR, rollout.response_lengths_B, settings.gamma, settings.lam
    )
    if settings.whiten_advantages:
        advantages_BR = whiten(advantages_BR, mask_BR, summed(moments(advantages_BR, mask_BR)))
    return Experience(
        rollout=rollout,
        scores_B=scores_B,
        old_logprobs_BR=old_logprobs_BR,
        ref_logprobs_BR=ref_logprobs_BR,
        values_BR=values_BR,
        rewards_BR=rewards_BR,
        advantages_BR=advantages_BR,
        returns_BR=returns_BR,
    )


def score(rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> torch.Tensor:
    """Return scores_B: the reward model at each response's last real token, on the scale that is asked for, clipped to
    +- clip_reward."""
    sequences = sequences_of(rollout)
    scores_B = torch.zeros(len(sequences), device=rollout.response_ids_BR.device)
    for chosen, rows in laid_out(sequences, settings.plan, settings.pad_token_id, scores_B.device):
        scores_B[chosen] = roles.reward_model(rows)[: len(chosen)]
    if settings.score_scale is not None:
        scores_B = (scores_B - settings.score_scale.mean) / settings.score_scale.std
    return scores_B.clamp(-settings.clip_reward, settings.clip_reward)


def sequences_of(rollout: Rollout) -> list[TokenSequence]:
    """Prompt + response of each row, without padding, on the CPU; the response tokens are the targets."""
    return [
        join(rollout.prompt_of(index).cpu(), rollout.response_of(index).cpu())
        for index in range(rollout.prompt_ids_BP.shape[0])
    ]


def laid_out(
    sequences: Sequence[TokenSequence], plan: PlanSettings, pad_token_id: int, device: torch.device
) -> list[tuple[list[int], TokenRows]]:
    """This rank's own sequences as micro-batches: (indices in the order of the rows, rows). All ranks get the same
    number of them.

    `plan.ranks` is not read: the sequences stay on the rank that rolled them out.
    """
    mine = list(plan_step([len(item) for item in sequences], replace(plan, ranks=1)).micro_batches[0])
    mine += [()] * (largest(len(mine), device) - len(mine))
    documents = [plain(sequence) for sequence in sequences]
    return [
        (
            [index for row in rows for index in row],
            packed_rows([[documents[index] for index in row] for row in rows], pad_token_id).to(device),
        )
        for rows in mine
    ]


def _per_token(
    rollout: Rollout, settings: ExperienceSettings, read: Callable[[TokenRows], torch.Tensor]
) -> torch.Tensor:
    """Return float32 [B, R]: what `read` gives for the response tokens of each micro-batch, 0 elsewhere."""
    mask_BR = rollout.response_mask_BR
    result_BR = torch.zeros(mask_BR.shape, device=mask_BR.device)
    for chosen, rows in laid_out(sequences_of(rollout), settings.plan, settings.pad_token_id, mask_BR.device):
        values_M = read(rows)
        part_bR = torch.zeros(len(chosen), mask_BR.shape[1], device=mask_BR.device)
        # Targets come in the order of the sequences, each from its first response token on: row-major in the mask.
        part_bR[mask_BR[chosen]] = values_M
        result_BR[chosen] = part_bR
    return result_BR
