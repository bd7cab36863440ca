"""Rollouts and models -> Experience: parts 3 to 6 of the loop.

B sequences of this rank, R response tokens, M response tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from training.step3_ppo.advantages import Estimator
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.advantages.whiten import moments, whiten
from training.step3_ppo.exchange import MicroBatch, read_balanced
from training.step3_ppo.kl import AdaptiveKl, FixedKl
from training.step3_ppo.mismatch import importance_weights
from training.step3_ppo.records import Experience, KeptForward, Rollout, Samples, sequence_number
from training.step3_ppo.reward_shaping import missing_eos_punishment, overlong_punishment, shaped_rewards
from training.step3_ppo.rewards.weighted import MODEL_ALONE, Rewards
from training.step3_ppo.roles import Roles
from training.utils.engine.collectives import summed
from training.utils.layout.documents import Document, TokenSequence, plain, shared_prompt
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.models.score_scale import ScoreScale
from training.utils.models.target_head import TokenLogprobs
from training.utils.run.phase_clock import PhaseClock


@dataclass(frozen=True)
class KlSettings:
    """coefficient: at the start. estimate: one of kl.py, fn(logprobs, ref_logprobs), or fn(logits, ref_logits) where
    it is of_logits. target, horizon: of the adaptive controller; None keeps the coefficient as it is."""

    coefficient: float
    in_loss: bool
    estimate: Callable[..., torch.Tensor]
    of_logits: bool = False
    target: float | None = None
    horizon: float = 10000.0

    def controller(self) -> FixedKl:
        if self.target is None:
            return FixedKl(self.coefficient)
        return AdaptiveKl(self.coefficient, self.target, self.horizon)


@dataclass(frozen=True)
class LengthSettings:
    """What the end and the length of a response do; see the flags of the same names. max_tokens: of a response."""

    max_tokens: int
    missing_eos_penalty: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    mask_truncated_responses: bool = False


@dataclass(frozen=True)
class MismatchSettings:
    """See `mismatch.importance_weights`."""

    correction: str
    level: str
    threshold: float


@dataclass(frozen=True)
class ExperienceSettings:
    """Of parts 3 to 6; see the flags of the same names. score_scale: of --normalize_reward_scores; None leaves scores
    as they are. samples_per_prompt: adjacent sequences of a rollout that are one group. reads_old_logprobs: False where
    the update is exactly on-policy and nothing else reads them. keeps_forwards: read with graphs, from which the one
    update learns; needs no dropout. with_entropy: of the forwards that are kept. mismatch: None does not correct.
    rewards: what is summed to the score; score_scale and clip_reward are the reward model's. rank: this one, of
    plan.ranks."""

    temperature: float
    score_scale: ScoreScale | None
    clip_reward: float
    samples_per_prompt: int
    estimator: Estimator
    advantage: AdvantageSettings
    whiten_advantages: bool
    kl: KlSettings
    length: LengthSettings
    mismatch: MismatchSettings | None
    reads_old_logprobs: bool
    plan: PlanSettings
    pad_token_id: int
    rewards: Rewards = MODEL_ALONE
    rank: int = 0
    keeps_forwards: bool = False
    with_entropy: bool = False


def make_experience(
    samples: Samples,
    greedy: Samples | None,
    roles: Roles,
    settings: ExperienceSettings,
    kl_coef: float,
    clock: PhaseClock,
) -> Experience:
    """Parts 4 to 6: log-probabilities and values, rewards of tokens, advantages. A collective: all ranks call.

    greedy: one greedy response to each prompt, where the estimator needs it. Scores are collected after the forwards,
    during which reward functions may be at work.
    """
    rollout = samples.rollout
    mask_BR, lengths_B = rollout.response_mask_BR, rollout.response_lengths_B
    with clock.phase("4_read"):
        read, kept = _per_token(rollout, roles, settings)
    old_BR, ref_BR, values_BR = (read.get(name) for name in ("old", "reference", "values"))
    with clock.phase("5_rewards"):
        kl_BR = torch.zeros(mask_BR.shape, device=mask_BR.device)
        if "kl" in read:
            kl_BR = read["kl"]
        elif not settings.kl.in_loss and old_BR is not None and ref_BR is not None:
            kl_BR = settings.kl.estimate(old_BR, ref_BR)
        scored = samples.scored
        rewards_BR = shaped_rewards(scored.outcomes_B, kl_BR, lengths_B, kl_coef)
    with clock.phase("6_advantages"):
        greedy_scores_B = None
        if greedy is not None:
            greedy_scores_B = greedy.scored.outcomes_B.repeat_interleave(settings.samples_per_prompt)
        group_B = torch.arange(len(lengths_B), device=lengths_B.device) // settings.samples_per_prompt
        inputs = AdvantageInputs(rewards_BR, lengths_B, group_B, values_BR, greedy_scores_B, over_ranks=summed)
        advantages_BR, returns_BR = settings.estimator.estimate(inputs, settings.advantage)
        if settings.whiten_advantages:
            advantages_BR = whiten(advantages_BR, mask_BR, summed(moments(advantages_BR, mask_BR)))
        weights_BR = _weights(rollout, old_BR, settings.mismatch)
    counts_B = rollout.ended_B if settings.length.mask_truncated_responses else torch.ones_like(rollout.ended_B)
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
        reward_parts=scored.parts,
        kept=kept,
    )


def outcome_scores(rollout: Rollout, scores_B: torch.Tensor, length: LengthSettings) -> torch.Tensor:
    """Return the scores with what the responses' ends and lengths take off: what the samples of a prompt compare."""
    punishment_B = overlong_punishment(rollout.response_lengths_B, length.max_tokens, length.overlong_buffer_tokens)
    ending_B = missing_eos_punishment(rollout.ended_B, length.missing_eos_penalty)
    return scores_B + ending_B + length.overlong_penalty * punishment_B


def _weights(
    rollout: Rollout, old_logprobs_BR: torch.Tensor | None, mismatch: MismatchSettings | None
) -> torch.Tensor | None:
    if mismatch is None:
        return None
    assert old_logprobs_BR is not None  # reads_old_logprobs is True wherever there is a correction
    return importance_weights(
        old_logprobs_BR,
        rollout.sampled_logprobs_BR,
        rollout.response_mask_BR,
        mismatch.correction,
        mismatch.level,
        mismatch.threshold,
    )


@torch.no_grad()
def score(rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> torch.Tensor:
    """Return float32 [B]: the reward model at each response's last real token, on the scale that is asked for, clipped
    to +- clip_reward."""
    assert roles.reward_model is not None  # loaded wherever --reward has the model
    model, device = roles.reward_model, rollout.response_lengths_B.device
    layout = _layout(settings, device)
    read = read_balanced(
        rollout.sequences(), settings.rank, layout, lambda _, rows: {"score": model(rows)}, lambda _: 1, device
    )
    scores_B = read["score"]
    if settings.score_scale is not None:
        scores_B = (scores_B - settings.score_scale.mean) / settings.score_scale.std
    clipped_B = scores_B.clamp(-settings.clip_reward, settings.clip_reward)
    return torch.where(scores_B.isfinite(), clipped_B, scores_B)  # an infinite one is a fault, and found as one


def laid_out(
    sequences: Sequence[TokenSequence],
    plan: PlanSettings,
    pad_token_id: int,
    rank: int,
    device: torch.device,
    sharing: bool = True,
) -> list[MicroBatch]:
    """The share of `rank` in all ranks' sequences, as micro-batches: as many on every rank, and nearly as many tokens.
    Where documents may share rows, and with `sharing`, the responses to one prompt share it."""
    groups, documents = documents_of(sequences, plan, sharing)
    mine = plan_step([document.tokens for document in documents], plan).micro_batches[rank]
    return [
        (
            [index for row in rows for place in row for index in groups[place]],
            packed_rows([[documents[place] for place in row] for row in rows], pad_token_id).to(device),
        )
        for rows in mine
    ]


def documents_of(
    sequences: Sequence[TokenSequence], plan: PlanSettings, sharing: bool = True
) -> tuple[list[list[int]], list[Document]]:
    """The documents that `laid_out` packs, and the indices of the sequences in each."""
    groups = [[index] for index in range(len(sequences))]
    if plan.packed and sharing:
        groups = shared_groups(sequences, plan.max_row_tokens)
    return groups, [_document([sequences[index] for index in group]) for group in groups]


def shared_groups(sequences: Sequence[TokenSequence], most_tokens: int) -> list[list[int]]:
    """Indices of the sequences that have one prompt (what stands before the first target), in groups that take at most
    `most_tokens` with the prompt counted once."""
    open_groups: dict[tuple[int, ...], tuple[list[int], int]] = {}  # prompt -> its last group, and its tokens
    groups: list[list[int]] = []
    for index, sequence in enumerate(sequences):
        prompt_tokens = _prompt_tokens(sequence)
        prompt = tuple(sequence.input_ids[:prompt_tokens].tolist())
        group, tokens = open_groups.get(prompt, ([], prompt_tokens))
        response_tokens = len(sequence) - prompt_tokens
        if not group or tokens + response_tokens > most_tokens:
            group, tokens = [], prompt_tokens
            groups.append(group)
        group.append(index)
        open_groups[prompt] = (group, tokens + response_tokens)
    return groups


def _prompt_tokens(sequence: TokenSequence) -> int:
    return int(sequence.is_target.long().argmax())


def _document(sequences: Sequence[TokenSequence]) -> Document:
    if len(sequences) == 1:
        return plain(sequences[0])
    cut = _prompt_tokens(sequences[0])
    prompt = TokenSequence(sequences[0].input_ids[:cut], sequences[0].is_target[:cut])
    return shared_prompt(prompt, [TokenSequence(item.input_ids[cut:], item.is_target[cut:]) for item in sequences])


def _per_token(
    rollout: Rollout, roles: Roles, settings: ExperienceSettings
) -> tuple[dict[str, torch.Tensor], list[KeptForward]]:
    """Return float32 [B, R] by name, what is read for the response tokens of this rank, 0 elsewhere; and the forwards
    with their graphs, where these are kept."""
    mask_BR = rollout.response_mask_BR
    kept: list[KeptForward] = []

    def read(chosen: Sequence[int], rows: TokenRows) -> dict[str, torch.Tensor]:
        policy, values_M, others = _read(rows, roles, settings)
        if settings.keeps_forwards:
            assert policy is not None  # reads_old_logprobs is True wherever forwards are kept
            numbers = _numbers(chosen, len(rollout.response_lengths_B), settings)
            kept.append(KeptForward(numbers, rows, policy, values_M))
        own = {"old": None if policy is None else policy.logprobs_M, "values": values_M}
        return others | {name: values.detach() for name, values in own.items() if values is not None}

    # Forwards that are learned from are those of training: only there activations may be recomputed.
    with contextlib.nullcontext() if settings.keeps_forwards else roles.reading(), torch.no_grad():
        found = read_balanced(
            rollout.sequences(),
            settings.rank,
            _layout(settings, mask_BR.device),
            read,
            lambda sequence: int(sequence.is_target.sum()),
            mask_BR.device,
        )
    result = {}
    for name, values in found.items():
        result[name] = torch.zeros(mask_BR.shape, device=mask_BR.device)
        # Targets come in the order of the sequences, each from its first response token on: row-major in the mask.
        result[name][mask_BR] = values
    return result, kept


def _numbers(chosen: Sequence[int], per_rank: int, settings: ExperienceSettings) -> list[int]:
    """chosen: indices of sequences, counted through the ranks, each of which has as many."""
    places = (divmod(index, per_rank) for index in chosen)
    return [sequence_number(rank, own, settings.samples_per_prompt, settings.plan.ranks) for rank, own in places]


def _layout(
    settings: ExperienceSettings, device: torch.device
) -> Callable[[list[TokenSequence]], Sequence[MicroBatch]]:
    return lambda sequences: laid_out(sequences, settings.plan, settings.pad_token_id, settings.rank, device)


def _read(
    rows: TokenRows, roles: Roles, settings: ExperienceSettings
) -> tuple[TokenLogprobs | None, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Of one micro-batch, float32 [M] each, those that are wanted: the old policy, the critic's values; by name the
    reference's log-probabilities and the exact KL of both. Actor and critic with their graphs, where these are kept."""
    of_logits = settings.kl.of_logits and not settings.kl.in_loss
    policy = values_M = None
    with torch.set_grad_enabled(settings.keeps_forwards):
        if settings.reads_old_logprobs:
            policy = roles.actor(rows, settings.temperature, settings.with_entropy, with_logits=of_logits)
        if roles.critic is not None:
            values_M = roles.critic(rows, at="targets")
    others: dict[str, torch.Tensor] = {}
    if roles.reference is not None:
        reference = roles.reference(rows, settings.temperature, with_logits=of_logits)
        others["reference"] = reference.logprobs_M
        if of_logits:  # reads_old_logprobs is True wherever the reward has a KL
            assert policy is not None
            others["kl"] = settings.kl.estimate(policy.logits_MV, reference.logits_MV)
            policy = policy._replace(logits_MV=None)
    return policy, values_M, others
