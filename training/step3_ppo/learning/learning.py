"""Part 7 of the loop: a rollout's epochs of minibatches, each one optimizer step of actor and critic.

M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.contracts.records import Experience, Forward, LearntBeside
from training.step3_ppo.experience.sequences import (
    TokenColumns,
    TrainingSequence,
    counted_by_the_actor,
    sequences_of_all_ranks,
    training_sequences,
)
from training.step3_ppo.learning.notes import FIRST, LearntRollout, Minibatch, StepNotes
from training.step3_ppo.learning.values import ValueLearner, critic_loss
from training.step3_ppo.losses import AGGREGATIONS
from training.step3_ppo.losses.losses import PolicyTokens, StepTotals, entropy_loss, token_mean, value_loss
from training.utils.base.seeds import derived_seed
from training.utils.base.transfer import pinned
from training.utils.contracts.documents import plain
from training.utils.contracts.run import NOT_OBSERVED
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, accumulate, on_device
from training.utils.engine.bad_steps import BadSteps
from training.utils.layout.order import ShuffledStream
from training.utils.layout.trie import rank_share
from training.utils.models.token_model import Readout
from training.utils.run.ahead import Ahead

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import LearntValues
    from training.step3_ppo.contracts.settings import ExperienceSettings, LearningSettings, PpoSettings
    from training.step3_ppo.learning.notes import PromptOutcome
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rows import PromptRow
    from training.utils.contracts.run import ObservedStep
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.models.token_model import TokenLogprobs


# Figures that are means over the tokens that count; the others are sums over the step, as losses are.
_TOKEN_MEANS = ("actor/clip_fraction", "actor/ratio", "actor/update_kl", "actor/entropy", "critic/clip_fraction")


@dataclass(frozen=True)
class Learner:
    """Takes optimizer steps. train_actor: False trains the critic alone. learnt: its part of the one step, if done."""

    roles: Roles
    experience: ExperienceSettings
    settings: LearningSettings
    kl_coef: float
    train_actor: bool = True
    learnt: LearntValues | None = None

    def learn(
        self,
        sequences: Sequence[TrainingSequence],
        noise_seed: int,
        forwards: Sequence[Forward],
        *,
        beside: Sequence[MicroBatch] = (),
        observed: ObservedStep = NOT_OBSERVED,
    ) -> dict[str, float]:
        """Run forwards, backwards and one step of the optimizers; return figures over all ranks. A collective.

        sequences: the minibatch of all ranks. forwards: this rank's of the minibatch, from `forwards`, or those that
        reading has made; each of these is good for one backward. beside: micro-batches of the actor of `LearntBeside`.
        observed: this step, whose observers see the minibatch alone.
        """
        roles, guests, device = self.roles, self.roles.actor_guests, self.roles.actor.ranks.device
        by_number = {sequence.number: sequence for sequence in sequences}
        batches = [
            (forward, TokenColumns([by_number[number] for number in forward.numbers], device))
            for forward in on_device(forwards, device)
        ]
        totals, actor_totals = self._totals(sequences)
        trainees: list[Trainee] = []
        if self.train_actor:
            selects = self.settings.policy_loss.selects
            selected = selects and selects(sequences, self.settings.policy, totals.tokens, noise_seed)
            loss = partial(self._actor_loss, totals=actor_totals, selected=selected)
            policies = [MicroBatch(part.rows, partial(loss, part, own), part.for_guests) for part, own in batches]
            counted = guests.tally([plain(part) for each in sequences for part in each.tokens.parts]) if guests else ()
            actor = observed.watched(Trainee("actor", roles.actor, policies, guests, counted))
            trainees.append(replace(actor, micro_batches=[*actor.micro_batches, *beside]))
        if roles.critic is not None:
            values = [MicroBatch(part.rows, partial(self._critic_loss, part, own, totals)) for part, own in batches]
            critic = Trainee("critic", roles.critic, [] if self.learnt else values, roles.critic_guests)
            trainees.append(critic if self.learnt else observed.watched(critic))
        sums, figures = accumulate(trainees, self.learnt.figures if self.learnt else None)
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

    def _read(self, forward: Forward) -> TokenLogprobs:
        """Return the actor's log-probabilities of a micro-batch's targets."""
        if forward.policy is not None:
            return forward.policy
        of_logits = self._has_kl and self.experience.kl.estimator.of_logits
        readout = Readout(self.experience.reading.temperature, self.settings.entropy_coef > 0, of_logits)
        return self.roles.actor(forward.rows, readout, **self.roles.actor_guests.forward_kwargs(forward.for_guests))

    def _actor_loss(
        self, forward: Forward, batch: TokenColumns, totals: StepTotals, selected: Mapping[int, torch.Tensor] | None
    ) -> MicroLoss:
        """Return this micro-batch's part of the actor's loss. selected: tokens that it treats apart, by sequence."""
        settings, sequence_M, counted_M = self.settings, forward.rows.sequence_M, batch.counted_M
        read = self._read(forward)
        # Exactly on-policy, the old policy is this one.
        old_logprobs_M = read.logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M
        selected_M = None
        if selected is not None:
            selected_M = torch.cat([sequence_M[:0].bool(), *(selected[number] for number in forward.numbers)])
        tokens = PolicyTokens(read.logprobs_M, old_logprobs_M, batch.advantages_M, sequence_M, selected_M)
        weights_M = AGGREGATIONS[settings.aggregation](batch.actor_counted_M, sequence_M, totals)
        policy_M, clipped_M = settings.policy_loss.loss(tokens, settings.policy)
        log_ratio_M = tokens.log_ratio_M.detach()
        of_update_M = self.experience.correction.loss_weights(log_ratio_M, sequence_M)
        corrections_M = batch.weights_M if of_update_M is None else of_update_M
        if corrections_M is not None:
            policy_M = policy_M * corrections_M
        loss = (policy_M * weights_M).sum()
        seen = {
            "actor/policy_loss": loss,
            "actor/clip_fraction": (clipped_M * counted_M).sum(),
            "actor/ratio": (log_ratio_M.exp() * counted_M).sum(),
            "actor/update_kl": (-(log_ratio_M * counted_M)).sum(),
        }
        for name, part, figure in self._added(read, forward, batch, weights_M):
            loss, seen[name] = loss + part, figure
        return MicroLoss(loss, seen, read)

    def _critic_loss(self, forward: Forward, batch: TokenColumns, totals: StepTotals) -> MicroLoss:
        critic, old_M, returns_M = self.roles.critic, batch.values_M, batch.returns_M
        assert critic is not None and old_M is not None and returns_M is not None  # both if there is a critic
        errors = value_loss(critic(forward.rows, at="targets"), old_M, returns_M, self.settings.clip_range_value)
        return critic_loss(batch.counted_M, token_mean(batch.counted_M, forward.rows.sequence_M, totals), *errors)

    def _added(
        self, read: TokenLogprobs, forward: Forward, batch: TokenColumns, weights_M: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield what is added to the policy's loss, if wanted: KL and entropy, each with its name and its figure."""
        if self._has_kl:
            kl_loss = (self._kl_of_loss(read, forward.rows, batch) * weights_M).sum()
            yield "actor/kl_loss", self.kl_coef * kl_loss, kl_loss
        if read.entropies_M is not None:
            part = (entropy_loss(read.entropies_M, self.settings.entropy_coef) * weights_M).sum()
            yield "actor/entropy", part, (read.entropies_M.detach() * batch.counted_M).sum()

    @property
    def _has_kl(self) -> bool:
        return self.experience.kl.in_loss and self.roles.reference is not None

    def _kl_of_loss(self, read: TokenLogprobs, rows: TokenRows, batch: TokenColumns) -> torch.Tensor:
        """Return the KL to the reference of each token, with a gradient."""
        estimator, reference = self.experience.kl.estimator, self.roles.reference
        if not estimator.of_logits or reference is None:
            return estimator.estimate(read.logprobs_M, batch.ref_logprobs_M)
        with torch.no_grad():
            ref_logits_MV = reference(rows, Readout(self.experience.reading.temperature, logits=True)).logits_MV
        return estimator.estimate(read.logits_MV, ref_logits_MV)


@dataclass(eq=False)
class Updates:
    """Trains the actor and the critic of `roles` on experiences. outcomes: of the prompts of the last rollout, of all
    ranks."""

    roles: Roles
    settings: PpoSettings
    beside: LearntBeside = field(default_factory=LearntBeside)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    outcomes: Sequence[PromptOutcome] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.ranks = self.roles.actor.ranks

    def value_learner(self, iteration: int) -> ValueLearner | None:
        """Return what the critic learns by while it reads, before `learn`; None if it reads and learns apart."""
        roles, experience = self.roles, self.settings.experience
        if roles.critic is None or not experience.reading.learns_values:
            return None
        begin = partial(self.settings.step_observers.begin, iteration, FIRST)
        return ValueLearner(roles.critic, experience, self.settings.updates.learning.clip_range_value, begin)

    def learn(
        self, experiences: Sequence[Experience], iteration: int, kl_coef: float, rows: Sequence[PromptRow] = ()
    ) -> dict[str, float]:
        """Return figures, means over the minibatches. rows: this rank's prompts, named where a step goes wrong. A
        collective."""
        ranks, experience, settings = self.ranks, self.settings.experience, self.settings.updates
        own = training_sequences(experiences, experience.samples_per_prompt, ranks.rank, ranks.world_size)
        sequences = sequences_of_all_ranks(own, ranks.device)
        train_actor = iteration > settings.critic_warmup
        rollout = LearntRollout(iteration, experiences, own, sequences, rows)
        learner = Learner(self.roles, experience, settings.learning, kl_coef, train_actor, rollout.learnt)
        notes = StepNotes(self.settings, ranks, rollout, kl_coef, self.bad_steps)
        for minibatch in self._minibatches(rollout, learner):
            count, layout = len(minibatch.sequences), experience.layout
            beside = self.beside.beside(count, self.roles.actor, layout) if train_actor else ()
            if not any(sequence.counts for sequence in minibatch.sequences):
                notes.empty += 1  # there is nothing to learn
                continue
            forwards = minibatch.forwards()
            observed = notes.begun()
            figures = learner.learn(minibatch.sequences, minibatch.seed, forwards, beside=beside, observed=observed)
            notes.taken(observed, minibatch, forwards, beside, figures=figures)
            if settings.stop_update_kl is not None and figures.get("actor/update_kl", 0.0) > settings.stop_update_kl:
                break
        self.outcomes = notes.outcomes()
        return notes.figures(train_actor)

    def _minibatches(self, rollout: LearntRollout, learner: Learner) -> Iterator[Minibatch]:
        """Yield the minibatches of all epochs, each epoch in an order of its own. Their forwards are those that reading
        made, for --reuse_forwards, or new ones, which a thread lays out beside a GPU's work."""
        sequences, size = rollout.sequences, self.settings.updates.sequences_per_minibatch * self.ranks.world_size
        orders = []
        for epoch in range(self.settings.updates.ppo_epochs):
            seed = derived_seed(self.settings.seed, "minibatch", rollout.iteration, epoch)
            order = ShuffledStream(len(sequences), seed)
            orders += [(seed, order.take(start, size)) for start in range(0, len(sequences), size)]
        reusable = [forward for each in rollout.experiences for forward in each.reused.forwards]  # of the one minibatch
        laid_out: Iterable[Callable[[], Sequence[Forward]]] = [lambda: reusable] * len(orders)
        if not reusable:
            on_cuda = self.ranks.device.type == "cuda"
            ahead: Ahead[list[int], Sequence[Forward]] = Ahead(
                lambda places: learner.forwards([sequences[place] for place in places]), on_cuda
            )
            laid_out = ahead.each([places for _, places in orders])
        for (seed, places), forwards in zip(orders, laid_out, strict=True):
            yield Minibatch(seed, places, [sequences[place] for place in places], forwards)
