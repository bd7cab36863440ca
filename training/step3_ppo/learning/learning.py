"""Part 7 of the loop: a rollout's epochs of minibatches, each one optimizer step of actor and critic.

M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.contracts.records import Experience, Forward
from training.step3_ppo.experience.sequences import (
    TokenColumns,
    TrainingSequence,
    counted_by_the_actor,
    sequences_of_all_ranks,
    text_sequence,
    training_sequences,
)
from training.step3_ppo.learning.outcomes import PromptOutcome, prompt_outcomes
from training.step3_ppo.learning.record import MinibatchOfRollout, minibatch_numbers, policy_record
from training.step3_ppo.learning.selection import Selected, selected_tokens
from training.step3_ppo.losses import AGGREGATIONS
from training.step3_ppo.losses.added import entropy_loss, pretraining_loss, value_loss
from training.step3_ppo.losses.aggregation import StepTotals, token_mean
from training.step3_ppo.losses.tokens import PolicyTokens
from training.step3_ppo.measures.measures import Measure, Moments, figures_of, moments, spread
from training.step3_ppo.mismatch.weights import loss_weights
from training.utils.base.seeds import derived_seed
from training.utils.base.transfer import moved, pinned
from training.utils.contracts.documents import TokenSequence, plain
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, accumulate, on_device
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.order import ShuffledStream
from training.utils.layout.rank_share import documents_of, rank_share
from training.utils.recording.recorder import NOT_RECORDED
from training.utils.run.ahead import Ahead

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import ExperienceSettings, LearningSettings, PpoSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rows import PromptRow, TextBlock
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.target_head import TokenLogprobs
    from training.utils.recording.recorder import StepRecording


# Figures that are means over the tokens that count; the others are sums over the step, as losses are.
_TOKEN_MEANS = ("actor/clip_fraction", "actor/ratio", "actor/update_kl", "actor/entropy", "critic/clip_fraction")


@dataclass(frozen=True)
class Learner:
    """Takes optimizer steps. train_actor: False trains the critic alone."""

    roles: Roles
    experience: ExperienceSettings
    settings: LearningSettings
    kl_coef: float
    train_actor: bool = True

    def learn(
        self,
        sequences: Sequence[TrainingSequence],
        texts: Sequence[TokenSequence],
        noise_seed: int,
        forwards: Sequence[Forward],
        *,
        recording: StepRecording = NOT_RECORDED,
    ) -> dict[str, float]:
        """Run forwards, backwards and one step of the optimizers; return figures over all ranks. A collective.

        sequences: the minibatch of all ranks. texts: one block per sequence, or none. forwards: this rank's of the
        minibatch, from `forwards`, or those that reading has made; each of these is good for one backward.
        recording: of this step.
        """
        roles, device = self.roles, self.roles.actor.ranks.device
        by_number = {sequence.number: sequence for sequence in sequences}
        totals, actor_totals = self._totals(sequences)
        selected = selected_tokens(sequences, self.settings, totals.tokens, noise_seed, device=device)
        batches = [
            (forward, TokenColumns([by_number[number] for number in forward.numbers], device))
            for forward in on_device(forwards, device)
        ]
        trainees = []
        if self.train_actor:
            learnt = [
                MicroBatch(part.rows, partial(self._actor_loss, part, own, actor_totals, selected), part.for_guests)
                for part, own in batches
            ]
            learnt = [*recording.watched("actor", roles.actor, learnt)]
            read_alone = self._text_batches(texts, device)
            guests = roles.actor_guests
            recording.note(other_terms=bool(guests) or bool(texts and self.settings.unsup_coef))
            counted = guests.tally([plain(part) for each in sequences for part in each.tokens.parts]) if guests else ()
            trainees.append(Trainee("actor", roles.actor, [*learnt, *read_alone], guests, counted))
        if roles.critic is not None:
            learnt = [MicroBatch(part.rows, partial(self._critic_loss, part, own, totals)) for part, own in batches]
            learnt = [*recording.watched("critic", roles.critic, learnt)]
            trainees.append(Trainee("critic", roles.critic, learnt, roles.critic_guests))
        sums, figures = accumulate(trainees)
        if totals.tokens:  # otherwise there are no means
            figures |= {name: value / totals.tokens if name in _TOKEN_MEANS else value for name, value in sums.items()}
        return figures

    def _totals(self, sequences: Sequence[TrainingSequence]) -> tuple[StepTotals, StepTotals]:
        """Return the totals of all responses that count, which the step's denominators are, and those of the actor's
        loss, which rejected tokens may have left."""
        counted = [sequence for sequence in sequences if sequence.counts]
        longest = float(self.experience.scoring.length.max_tokens)
        tokens = float(sum(len(sequence.advantages_r) for sequence in counted))
        return StepTotals(tokens, float(len(counted)), longest), StepTotals(*counted_by_the_actor(counted), longest)

    def _text_batches(self, texts: Sequence[TokenSequence], device: torch.device) -> list[MicroBatch]:
        """Return this rank's micro-batches of texts, which are only read if their loss has no weight."""
        if not texts:
            return []
        actor, coefficient = self.roles.actor, self.settings.unsup_coef
        tokens = float(sum(int(text.is_target.sum()) for text in texts))

        def loss_of(rows: TokenRows) -> MicroLoss:
            loss = pretraining_loss(actor(rows).logprobs_M, tokens)
            return MicroLoss(coefficient * loss, {"actor/pretraining_loss": loss})

        shares = [moved(rows, device) for _, rows in rank_share(texts, self.experience.layout, device, sharing=False)]
        return [MicroBatch(rows, partial(loss_of, rows), learns=coefficient > 0) for rows in shares]

    def forwards(self, sequences: Sequence[TrainingSequence]) -> list[Forward]:
        """Return this rank's forwards of a minibatch, laid out on the CPU. Pure."""
        guests, device = self.roles.actor_guests, self.roles.actor.ranks.device
        tokens = [sequence.tokens for sequence in sequences]
        return [
            Forward(
                [sequences[index].number for index in indices], rows, for_guests=pinned(guests.prepare(rows), device)
            )
            for indices, rows in rank_share(tokens, self.experience.layout, device, with_before=guests.needs_before)
        ]

    def _read(self, forward: Forward, with_logits: bool) -> TokenLogprobs:
        """Return the actor's log-probabilities of a micro-batch's targets."""
        if forward.policy is not None:
            return forward.policy
        with_entropy, more = self.settings.entropy_coef > 0, self.roles.actor_guests.forward_kwargs(forward.for_guests)
        temperature = self.experience.reading.temperature
        return self.roles.actor(forward.rows, temperature, with_entropy, with_logits=with_logits, **more)

    def _actor_loss(
        self, forward: Forward, batch: TokenColumns, totals: StepTotals, selected: Selected | None
    ) -> MicroLoss:
        """Return this micro-batch's part of the actor's loss. selected: of KL-Cov and Clip-Cov; None for others."""
        settings, kl, rows = self.settings, self.experience.kl, forward.rows
        kl_in_loss = kl.in_loss and self.roles.reference is not None
        read = self._read(forward, with_logits=kl_in_loss and kl.estimator.of_logits)
        # Exactly on-policy, the old policy is this one.
        old_logprobs_M = read.logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M
        selected_M = None if selected is None else selected.of_rows(forward.numbers)
        tokens = PolicyTokens(read.logprobs_M, old_logprobs_M, batch.advantages_M, rows.sequence_M, selected_M)
        weights_M = AGGREGATIONS[settings.aggregation](batch.actor_counted_M, rows.sequence_M, totals)
        policy_M, clipped_M = settings.policy_loss.loss(tokens, settings.policy)
        counted_M, log_ratio_M = batch.counted_M, tokens.log_ratio_M.detach()
        corrections_M = batch.weights_M
        if settings.bypass is not None:
            corrections_M = loss_weights(log_ratio_M, rows.sequence_M, settings.bypass)
        if corrections_M is not None:
            policy_M = policy_M * corrections_M
        loss = (policy_M * weights_M).sum()
        seen = {
            "actor/policy_loss": loss,
            "actor/clip_fraction": (clipped_M * counted_M).sum(),
            "actor/ratio": (log_ratio_M.exp() * counted_M).sum(),
            "actor/update_kl": (-(log_ratio_M * counted_M)).sum(),
        }
        if kl_in_loss:
            kl_loss = (self._kl_of_loss(read, rows, batch) * weights_M).sum()
            loss = loss + self.kl_coef * kl_loss
            seen["actor/kl_loss"] = kl_loss
        if read.entropies_M is not None:
            loss = loss + (entropy_loss(read.entropies_M, settings.entropy_coef) * weights_M).sum()
            seen["actor/entropy"] = (read.entropies_M.detach() * counted_M).sum()
        return MicroLoss(loss, seen, read)

    def _kl_of_loss(self, read: TokenLogprobs, rows: TokenRows, batch: TokenColumns) -> torch.Tensor:
        """Return the KL to the reference of each token, with a gradient."""
        estimator, reference = self.experience.kl.estimator, self.roles.reference
        if not estimator.of_logits or reference is None:
            return estimator.estimate(read.logprobs_M, batch.ref_logprobs_M)
        with torch.no_grad():
            ref_logits_MV = reference(rows, self.experience.reading.temperature, with_logits=True).logits_MV
        return estimator.estimate(read.logits_MV, ref_logits_MV)

    def _critic_loss(self, forward: Forward, batch: TokenColumns, totals: StepTotals) -> MicroLoss:
        values_M = forward.values_M
        if values_M is None:
            assert self.roles.critic is not None
            values_M = self.roles.critic(forward.rows, at="targets")
        assert batch.values_M is not None and batch.returns_M is not None  # an experience has both if there is a critic
        clip_range = self.settings.clip_range_value
        loss_M, clipped_M = value_loss(values_M, batch.values_M, batch.returns_M, clip_range)
        loss = (loss_M * token_mean(batch.counted_M, forward.rows.sequence_M, totals)).sum()
        clipped = (clipped_M * batch.counted_M).sum()
        return MicroLoss(loss, {"critic/value_loss": loss, "critic/clip_fraction": clipped})


@dataclass(eq=False)
class Updates:
    """Trains the actor and the critic of `roles` on experiences. texts: unsupervised, mixed in; None without. outcomes:
    of the prompts of the last rollout, of all ranks."""

    roles: Roles
    settings: PpoSettings
    texts: Sequence[TextBlock] | None = None
    bad_steps: BadSteps = field(default_factory=BadSteps)
    texts_taken: int = field(default=0, init=False)
    outcomes: Sequence[PromptOutcome] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.ranks = self.roles.actor.ranks
        self._text_stream = None if self.texts is None else ShuffledStream(len(self.texts), self.settings.seed)

    def learn(
        self, experiences: Sequence[Experience], iteration: int, kl_coef: float, rows: Sequence[PromptRow] = ()
    ) -> dict[str, float]:
        """Return figures, means over the minibatches. rows: this rank's prompts, named where a step goes wrong. A
        collective."""
        ranks, experience, settings = self.ranks, self.settings.experience, self.settings.updates
        train_actor = iteration > settings.critic_warmup
        own = training_sequences(experiences, experience.samples_per_prompt, ranks.rank, ranks.world_size)
        sequences = sequences_of_all_ranks(own, ranks.device)
        row_ids = _row_ids_of_all_ranks(rows, experience.samples_per_prompt)
        reusable = [forward for each in experiences for forward in each.reusable]  # of one minibatch
        learner = Learner(self.roles, experience, settings.learning, kl_coef, train_actor)
        steps: list[dict[str, float]] = []
        empty = computed = 0
        stepped: set[int] = set()
        minibatches = self._minibatches(len(sequences), iteration)
        ahead: Ahead[list[int], list[Forward]] = Ahead(
            lambda places: learner.forwards([sequences[place] for place in places]),
            in_background=ranks.device.type == "cuda" and not reusable,
        )
        laid_out_ahead = ahead.each([places for _, places in minibatches])
        for (seed, places), laid_out in zip(minibatches, laid_out_ahead, strict=True):
            picked = [sequences[index] for index in places]
            texts = self._next_texts(len(picked)) if train_actor else []
            if not any(sequence.counts for sequence in picked):  # there is nothing to learn
                empty += 1
                continue
            forwards = reusable or laid_out()
            computed += sum(forward.rows.input_ids_NT.numel() for forward in forwards)
            recording = self.settings.records.of_step(iteration, ranks, len(steps) + 1)
            figures = learner.learn(picked, texts, seed, forwards, recording=recording)
            recorded = MinibatchOfRollout(iteration, experiences, own, picked, forwards)
            make_record = partial(policy_record, recorded, experience, settings.learning, kl_coef=kl_coef)
            numbers = minibatch_numbers(recorded, rows, figures, is_first=not steps)
            recording.write(partial(make_record, figures=figures), numbers)
            self.bad_steps.check(iteration, figures, [row_ids[place] for place in places] if rows else [])
            if train_actor and self.roles.average is not None and not figures["actor/skipped"]:
                self.roles.average.update()
            stepped.update(places if not figures.get("actor/skipped", 0.0) else ())
            steps.append(figures)
            if settings.stop_update_kl is not None and figures.get("actor/update_kl", 0.0) > settings.stop_update_kl:
                break
        self.outcomes = prompt_outcomes(row_ids, sequences, stepped, experience.samples_per_prompt) if rows else ()
        return self._figures(steps, empty, sequences, train_actor) | (rank_token_figures(computed) if steps else {})

    def _minibatches(self, sequences: int, iteration: int) -> list[tuple[int, list[int]]]:
        """Return each minibatch of all epochs: its epoch's seed, and its places among the sequences."""
        size = self.settings.updates.sequences_per_minibatch * self.ranks.world_size
        found = []
        for epoch in range(self.settings.updates.ppo_epochs):
            seed = derived_seed(self.settings.seed, "minibatch", iteration, epoch)
            order = ShuffledStream(sequences, seed)
            found += [(seed, order.take(start, size)) for start in range(0, sequences, size)]
        return found

    def _next_texts(self, count: int) -> list[TokenSequence]:
        """Return one block of unsupervised text per sequence of the minibatch; none if no text is given."""
        if self.texts is None or self._text_stream is None:
            return []
        taken = self._text_stream.take(self.texts_taken, count)
        self.texts_taken += count
        return [text_sequence(self.texts[row]) for row in taken]

    def _figures(
        self, steps: Sequence[dict[str, float]], empty: int, sequences: Sequence[TrainingSequence], train_actor: bool
    ) -> dict[str, float]:
        """Return means over the steps, and their FLOPs. empty: minibatches without a step."""
        settings = self.settings
        means = {}
        for name in dict.fromkeys(name for figures in steps for name in figures):
            values = [figures[name] for figures in steps if name in figures]
            means[name] = sum(values) / len(values)
        means |= {"train/minibatches": float(len(steps)), "train/empty_minibatches": float(empty)}
        if settings.updates.meters:
            tokens = [sequence.tokens for sequence in sequences]
            documents = documents_of(tokens, settings.experience.layout.plan)
            targets = sum(int(part.is_target.sum()) for part in tokens)
            epochs = len(steps) * settings.updates.sequences_per_minibatch * self.ranks.world_size / len(sequences)
            trained = settings.updates.meters if train_actor else settings.updates.meters[1:]
            means["learn/flops"] = epochs * sum(meter.flops(documents, targets) for meter in trained)
        return means


def rank_token_figures(computed: int) -> dict[str, float]:
    """Return the mean, deviation and extremes over ranks of the tokens that each computed in a rollout's updates,
    padding included and a shared prompt once. A collective."""
    measure = Measure(torch.tensor([float(computed)]), spread("train/rank_tokens"))
    [own] = moments([measure])
    return figures_of([measure], [reduce(Moments.joined, gathered(own))])


def _row_ids_of_all_ranks(rows: Sequence[PromptRow], samples_per_prompt: int) -> list[int]:
    """Return the row of each of all ranks' sequences, in the order of their numbers. A collective."""
    parts = gathered([row.row_id for row in rows])
    return [row_id for prompts in zip(*parts, strict=True) for row_id in prompts for _ in range(samples_per_prompt)]
