"""Part 7 of the loop: one optimizer step of actor and critic on a minibatch of sequences.

M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.step3_ppo.exchange import Packed, packed_sequences, packed_values, unpacked_sequences, unpacked_values
from training.step3_ppo.experience import ExperienceSettings, laid_out
from training.step3_ppo.losses import PolicyLoss, PolicyLossSettings, PolicyTokens
from training.step3_ppo.losses.aggregation import StepTotals, token_weights
from training.step3_ppo.losses.covariance import bound_of_chosen, covariance_sums, covariances, tokens_to_choose
from training.step3_ppo.losses.entropy import entropy_loss
from training.step3_ppo.losses.pretraining import pretraining_loss
from training.step3_ppo.losses.value import value_loss
from training.step3_ppo.records import Experience, KeptForward, sequence_number
from training.step3_ppo.roles import Roles
from training.utils.engine.collectives import gathered, several_ranks, summed_numbers
from training.utils.layout.documents import TokenSequence
from training.utils.layout.rows import TokenRows
from training.utils.models.target_head import TokenLogprobs
from training.utils.run.seeds import derived_seed


@dataclass(frozen=True)
class LearningSettings:
    """See the flags of the same names. policy_loss, aggregation: entries of their tables."""

    policy_loss: PolicyLoss
    policy: PolicyLossSettings
    aggregation: str
    clip_range_value: float
    entropy_coef: float
    cov_share: float
    clip_cov_low: float
    clip_cov_high: float
    unsup_coef: float


@dataclass(frozen=True)
class Piece:
    """One sequence of an Experience, its fields without padding. number: among the rollout's on all ranks, whatever
    their number. counts: False where the response is left out of the loss."""

    number: int
    sequence: TokenSequence
    counts: bool
    advantages_r: torch.Tensor
    old_logprobs_r: torch.Tensor | None
    ref_logprobs_r: torch.Tensor | None
    values_r: torch.Tensor | None
    returns_r: torch.Tensor | None
    weights_r: torch.Tensor | None


class Columns:
    """The per-token fields of several pieces, one after the other, in the order in which rows list their targets. A
    field that the experience lacks is None."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        nothing = torch.empty(0, device=device)

        def joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            have = [part for part in parts if part is not None]
            return None if len(have) < len(parts) else torch.cat([nothing, *have])

        self.advantages_M = torch.cat([nothing, *(piece.advantages_r for piece in pieces)])
        self.counted_M = torch.cat(
            [nothing, *(torch.full_like(piece.advantages_r, float(piece.counts)) for piece in pieces)]
        )
        self.old_logprobs_M = joined([piece.old_logprobs_r for piece in pieces])
        self.ref_logprobs_M = joined([piece.ref_logprobs_r for piece in pieces])
        self.values_M = joined([piece.values_r for piece in pieces])
        self.returns_M = joined([piece.returns_r for piece in pieces])
        self.weights_M = joined([piece.weights_r for piece in pieces])


def pieces_of(experiences: Sequence[Experience], samples_per_prompt: int, rank: int, world_size: int) -> list[Piece]:
    """Cut experiences into their sequences, so that minibatches can mix those of several rollouts."""
    pieces: list[Piece] = []
    for experience in experiences:
        lengths = experience.rollout.response_lengths_B.tolist()
        for index, (sequence, length) in enumerate(zip(experience.rollout.sequences(), lengths, strict=True)):

            def own(field_BR: torch.Tensor | None, row: int = index, tokens: int = length) -> torch.Tensor | None:
                return None if field_BR is None else field_BR[row, :tokens]

            pieces.append(
                Piece(
                    number=sequence_number(rank, len(pieces), samples_per_prompt, world_size),
                    sequence=sequence,
                    counts=bool(experience.counts_B[index]),
                    advantages_r=experience.advantages_BR[index, :length],
                    old_logprobs_r=own(experience.old_logprobs_BR),
                    ref_logprobs_r=own(experience.ref_logprobs_BR),
                    values_r=own(experience.values_BR),
                    returns_r=own(experience.returns_BR),
                    weights_r=own(experience.weights_BR),
                )
            )
    return pieces


def everyones_pieces(own: Sequence[Piece], device: torch.device) -> list[Piece]:
    """All ranks' pieces in the order of their numbers: any number of ranks makes the same minibatches of them. A
    collective."""
    parts = gathered(_packed(own)) if several_ranks() else None
    if parts is None:
        return list(own)
    return sorted((piece for part in parts for piece in _unpacked(part, device)), key=lambda piece: piece.number)


_FIELDS = ("advantages_r", "old_logprobs_r", "ref_logprobs_r", "values_r", "returns_r", "weights_r")


def _packed(pieces: Sequence[Piece]) -> Packed:
    fields = {name: [getattr(piece, name) for piece in pieces] for name in _FIELDS}
    return {
        "numbers": [piece.number for piece in pieces],
        "counts": [piece.counts for piece in pieces],
        "sequences": packed_sequences([piece.sequence for piece in pieces]),
        "fields": {
            name: None if any(part is None for part in parts) else packed_values(parts)
            for name, parts in fields.items()
        },
    }


def _unpacked(packed: Packed, device: torch.device) -> list[Piece]:
    nothing = [None] * len(packed["numbers"])
    fields = [
        nothing if packed["fields"][name] is None else unpacked_values(packed["fields"][name], device)
        for name in _FIELDS
    ]
    sequences = unpacked_sequences(packed["sequences"])
    return [Piece(*each) for each in zip(packed["numbers"], sequences, packed["counts"], *fields, strict=True)]


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step of all ranks. texts: as many blocks of text, or none. text_tokens: to be predicted. chosen:
    for each piece its tokens that KL-Cov or Clip-Cov treats apart, or None."""

    pieces: Sequence[Piece]
    texts: Sequence[TokenSequence]
    totals: StepTotals
    text_tokens: float
    chosen: list[torch.Tensor] | None


def make_minibatch(
    pieces: Sequence[Piece],
    texts: Sequence[TokenSequence],
    experience: ExperienceSettings,
    settings: LearningSettings,
    noise_seed: int,
    device: torch.device,
) -> Minibatch:
    """Count what the step's denominators count, and choose tokens where the loss asks for it."""
    counted = [piece for piece in pieces if piece.counts]
    tokens = float(sum(len(piece.advantages_r) for piece in counted))
    totals = StepTotals(tokens, float(len(counted)), float(experience.length.max_tokens))
    picked = None
    if settings.policy_loss.keys is not None:
        picked = _chosen_tokens(pieces, tokens, settings, noise_seed, device)
    text_tokens = float(sum(int(text.is_target.sum()) for text in texts))
    return Minibatch(pieces, texts, totals, text_tokens, picked)


def learn_minibatch(
    minibatch: Minibatch,
    roles: Roles,
    experience: ExperienceSettings,
    settings: LearningSettings,
    kl_coef: float,
    train_actor: bool,
    kept: Sequence[KeptForward] = (),
) -> dict[str, float]:
    """Forwards, backwards and one step of the optimizers; return figures over all ranks. A collective.

    kept: this rank's forwards of the minibatch, where reading has made them, each for one backward.
    """
    device = roles.actor.ranks.device
    layout = (experience.plan, experience.pad_token_id, experience.rank, device)
    sums = dict.fromkeys(_SUMS, 0.0)
    sequences = [piece.sequence for piece in minibatch.pieces]
    place = {piece.number: index for index, piece in enumerate(minibatch.pieces)}
    forwards = [([place[number] for number in each.numbers], each.rows, each.policy, each.values_M) for each in kept]
    for indices, rows, policy, values_M in forwards or ((*each, None, None) for each in laid_out(sequences, *layout)):
        batch = Columns([minibatch.pieces[index] for index in indices], device)
        if train_actor:
            picked_M = None
            if minibatch.chosen is not None:
                picked_M = torch.cat([rows.sequence_M.new_zeros(0).bool(), *(minibatch.chosen[i] for i in indices)])
            loss, seen = _actor_loss(
                rows, policy, batch, picked_M, minibatch.totals, roles, experience, settings, kl_coef
            )
            roles.actor.backward(loss)
            _add(sums, seen)
        if roles.critic is not None:
            if values_M is None:
                values_M = roles.critic(rows, at="targets")
            loss, seen = _critic_loss(values_M, rows, batch, minibatch.totals, settings)
            roles.critic.backward(loss)
            _add(sums, seen)
    if minibatch.texts:
        for _, rows in laid_out(minibatch.texts, *layout, sharing=False):
            loss = pretraining_loss(roles.actor(rows).logprobs_M, settings.unsup_coef, minibatch.text_tokens)
            roles.actor.backward(loss)
            sums["pretraining_loss"] += float(loss.detach())
    reports = {}
    if train_actor:
        reports.update(roles.actor.step().figures("actor"))
    if roles.critic is not None:
        reports.update(roles.critic.step().figures("critic"))
    return reports | _figures(summed_numbers(sums, device), minibatch, roles, experience, settings, train_actor)


def text_sequence(block: Any) -> TokenSequence:
    """A block of text as a sequence of which all but the first token are to be predicted."""
    is_target = torch.ones(len(block.input_ids), dtype=torch.bool)
    is_target[0] = False
    return TokenSequence(torch.as_tensor(block.input_ids.astype("int64")), is_target)


_SUMS = (
    "policy_loss", "kl_loss", "entropy", "clipped", "ratio", "update_kl", "value_loss", "value_clipped",
    "pretraining_loss",
)  # fmt: skip


def _actor_loss(
    rows: TokenRows,
    kept: TokenLogprobs | None,
    batch: Columns,
    picked_M: torch.Tensor | None,
    totals: StepTotals,
    roles: Roles,
    experience: ExperienceSettings,
    settings: LearningSettings,
    kl_coef: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """This micro-batch's part of the actor's loss, and its sums for the figures. kept: the actor's forward, where it
    was read."""
    exact_kl = experience.kl.in_loss and experience.kl.of_logits and roles.reference is not None
    ref_logits_MV = None
    if exact_kl and roles.reference is not None:
        with torch.no_grad():
            ref_logits_MV = roles.reference(rows, experience.temperature, with_logits=True).logits_MV
    read = kept
    if read is None:
        read = roles.actor(rows, experience.temperature, settings.entropy_coef > 0, with_logits=exact_kl)
    # Exactly on-policy, the old policy is this one.
    old_logprobs_M = read.logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M
    tokens = PolicyTokens(read.logprobs_M, old_logprobs_M, batch.advantages_M, rows.sequence_M, picked_M)
    weights_M = token_weights(settings.aggregation, batch.counted_M, rows.sequence_M, totals)
    policy_M, clipped_M = settings.policy_loss.loss(tokens, settings.policy)
    if batch.weights_M is not None:
        policy_M = policy_M * batch.weights_M
    loss = (policy_M * weights_M).sum()
    counted_M, log_ratio_M = batch.counted_M, tokens.log_ratio_M.detach()
    seen = {
        "policy_loss": float(loss.detach()),
        "clipped": float((clipped_M * counted_M).sum()),
        "ratio": float((log_ratio_M.exp() * counted_M).sum()),
        "update_kl": float(-(log_ratio_M * counted_M).sum()),
    }
    if experience.kl.in_loss and batch.ref_logprobs_M is not None:
        pair = (read.logits_MV, ref_logits_MV) if exact_kl else (read.logprobs_M, batch.ref_logprobs_M)
        kl_loss = (experience.kl.estimate(*pair) * weights_M).sum()
        loss = loss + kl_coef * kl_loss
        seen["kl_loss"] = float(kl_loss.detach())
    if read.entropies_M is not None:
        loss = loss + (entropy_loss(read.entropies_M, settings.entropy_coef) * weights_M).sum()
        seen["entropy"] = float((read.entropies_M.detach() * counted_M).sum())
    return loss, seen


def _critic_loss(
    values_M: torch.Tensor, rows: TokenRows, batch: Columns, totals: StepTotals, settings: LearningSettings
) -> tuple[torch.Tensor, dict[str, float]]:
    assert batch.values_M is not None and batch.returns_M is not None  # an experience has both where there is a critic
    loss_M, clipped_M = value_loss(values_M, batch.values_M, batch.returns_M, settings.clip_range_value)
    loss = (loss_M * token_weights("token-mean", batch.counted_M, rows.sequence_M, totals)).sum()
    seen = {"value_loss": float(loss.detach()), "value_clipped": float((clipped_M * batch.counted_M).sum())}
    return loss, seen


def _chosen_tokens(
    pieces: Sequence[Piece], tokens_in_step: float, settings: LearningSettings, noise_seed: int, device: torch.device
) -> list[torch.Tensor]:
    """Bool for each piece, chosen over the tokens that count. The noise is each sequence's own."""
    assert settings.policy_loss.keys is not None
    counted = Columns([piece for piece in pieces if piece.counts], device)
    assert counted.old_logprobs_M is not None  # reads_old_logprobs is True wherever tokens are chosen
    sums = covariance_sums(counted.advantages_M, counted.old_logprobs_M)
    keys = []
    for piece in pieces:
        assert piece.old_logprobs_r is not None
        generator = torch.Generator().manual_seed(derived_seed(noise_seed, piece.number))
        noise_r = torch.rand(len(piece.advantages_r), generator=generator, dtype=torch.float64).to(device)
        covariance_r = covariances(piece.advantages_r, piece.old_logprobs_r, sums)
        keys.append(settings.policy_loss.keys(covariance_r, noise_r, settings.clip_cov_low, settings.clip_cov_high))
    nothing = torch.empty(0, dtype=torch.float64, device=device)
    those = torch.cat([nothing, *(key_r for key_r, piece in zip(keys, pieces, strict=True) if piece.counts)])
    bound = bound_of_chosen(those, tokens_to_choose(settings.cov_share, tokens_in_step))
    return [key_r >= bound for key_r in keys]


def _figures(
    total: dict[str, float],
    minibatch: Minibatch,
    roles: Roles,
    experience: ExperienceSettings,
    settings: LearningSettings,
    train_actor: bool,
) -> dict[str, float]:
    """Of one step. Where no response of it counts there is nothing to take a mean of."""
    tokens = minibatch.totals.tokens
    figures: dict[str, float] = {}
    if train_actor and tokens:
        figures["actor/policy_loss"] = total["policy_loss"]
        figures["actor/clip_fraction"] = total["clipped"] / tokens
        figures["actor/ratio"] = total["ratio"] / tokens
        figures["actor/update_kl"] = total["update_kl"] / tokens
        if experience.kl.in_loss and roles.reference is not None:
            figures["actor/kl_loss"] = total["kl_loss"]
        if settings.entropy_coef > 0:
            figures["actor/entropy"] = total["entropy"] / tokens
    if roles.critic is not None and tokens:
        figures["critic/value_loss"] = total["value_loss"]
        figures["critic/clip_fraction"] = total["value_clipped"] / tokens
    if minibatch.texts:
        figures["actor/pretraining_loss"] = total["pretraining_loss"] / settings.unsup_coef
    return figures


def _add(sums: dict[str, float], seen: dict[str, float]) -> None:
    for name, value in seen.items():
        sums[name] += value
